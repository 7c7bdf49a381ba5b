/* Paged attention for any CPU. Compilers that know vectors get vectors of 4, which is what NEON and SSE2 have. */
#include "attend.h"

#define TARGET
#define VECTOR static INLINE_ALWAYS
#define ENTRY attend_plain
#define BLOCK 2
#define LINES 4
#define KEEP(value) (void)(value)

#ifdef __GNUC__
#define LANES 4
typedef float vec __attribute__((vector_size(16)));
VECTOR vec v_set(float value) { return (vec){value, value, value, value}; }
VECTOR float lane(vec value, int i) { return value[i]; }
VECTOR vec from_lanes(const float *lanes) { return (vec){lanes[0], lanes[1], lanes[2], lanes[3]}; }
#else
#define LANES 1
typedef float vec;
VECTOR vec v_set(float value) { return value; }
VECTOR float lane(vec value, int i) { return (void)i, value; }
VECTOR vec from_lanes(const float *lanes) { return lanes[0]; }
#endif

VECTOR vec v_load(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}
VECTOR void v_store(float *to, vec value) { memcpy(to, &value, sizeof value); }
VECTOR vec v_add(vec a, vec b) { return a + b; }
VECTOR vec v_mul(vec a, vec b) { return a * b; }
VECTOR vec v_divide(vec a, vec b) { return a / b; }
VECTOR vec v_fma(vec a, vec b, vec c) { return a * b + c; }

VECTOR vec v_max(vec a, vec b) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = lane(a, i) > lane(b, i) ? lane(a, i) : lane(b, i);
    return from_lanes(lanes);
}

VECTOR float v_highest(vec value) {
    float highest = lane(value, 0);
    for (int i = 1; i < LANES; i++) highest = lane(value, i) > highest ? lane(value, i) : highest;
    return highest;
}

VECTOR float exp2_of(float x) {
    x = -127.0f > x ? -127.0f : x;
    x = 127.0f < x ? 127.0f : x;
    const int32_t whole = x == x ? (int32_t)(x + 128.5f) - 128 : 0;
    const float r = x - (float)whole;
    const float y = 1.0f + r * (EXP2_1 + r * (EXP2_2 + r * (EXP2_3 + r * (EXP2_4 + r * EXP2_5))));
    const uint32_t bits = (uint32_t)(whole + 127) << 23; /* 0, and so the power, where `whole` is -127 */
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

VECTOR vec v_exp2(vec x) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = exp2_of(lane(x, i));
    return from_lanes(lanes);
}

VECTOR vec v_keep(vec value, int32_t first, int32_t last) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = i >= first && i < last ? lane(value, i) : -INFINITY;
    return from_lanes(lanes);
}

VECTOR float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

VECTOR float widen(int kind, uint16_t half) {
    if (kind == KITE_BFLOAT16) return from_bits((uint32_t)half << 16);
    const uint32_t sign = half & 0x8000, size = half & 0x7fff;
    float value = from_bits(size << 13) * 0x1p112f; /* moves the exponent's bias; exact, subnormal or not */
    if (size >= 0x7c00) value = from_bits(size << 13 | 0x7f800000);
    return sign ? -value : value;
}

VECTOR uint16_t narrow(int kind, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (kind == KITE_BFLOAT16) return (uint16_t)(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (size < 0x38800000) { /* subnormal: adding 1/2 leaves a multiple of 2^-24 in the low bits, well rounded */
        const float moved = from_bits(size) + 0.5f;
        uint32_t low;
        memcpy(&low, &moved, sizeof low);
        return (uint16_t)(sign | (low - 0x3f000000));
    }
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

VECTOR float element(int kind, const uint8_t *from) {
    uint16_t half;
    float value;
    if (kind == KITE_FLOAT32) {
        memcpy(&value, from, sizeof value);
        return value;
    }
    memcpy(&half, from, sizeof half);
    return widen(kind, half);
}

VECTOR vec v_widen(int kind, const uint8_t *from) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = element(kind, from + (uint32_t)i * attend_bytes(kind));
    return from_lanes(lanes);
}

VECTOR void v_narrow(int kind, uint8_t *to, vec value) {
    for (int i = 0; i < LANES; i++) {
        const float one = lane(value, i);
        const uint16_t half = kind == KITE_FLOAT32 ? 0 : narrow(kind, one);
        if (kind == KITE_FLOAT32)
            memcpy(to + 4 * i, &one, sizeof one);
        else
            memcpy(to + 2 * i, &half, sizeof half);
    }
}

VECTOR void load_keys(int kind, const uint8_t *const *rows, int32_t dim, float *keys) {
    for (int i = 0; i < LANES; i++)
        for (int32_t channel = 0; channel < dim; channel++)
            keys[channel * KEYS + i] = element(kind, rows[i] + (uint32_t)channel * attend_bytes(kind));
}

#include "attend.inc"
