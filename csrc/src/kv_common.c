/* Plans, probability tables, and the parts of rANS that every kernel shares. */
#include "kv.h"

static const uint16_t WEIGHTS[16] = {0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024};

#ifdef KITE_SOURCES
/* Tells a build tool what this library was made of. */
extern KITE_API const char kite_sources[];
const char kite_sources[] = "kite sources " KITE_SOURCES;
#endif

uint32_t kite_abi(void) { return KITE_ABI; }

int32_t kite_best_kernel(void) {
#ifdef KITE_HAS_AVX2
    if (!__builtin_cpu_supports("avx2")) return KITE_PLAIN;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return KITE_AVX512;
    return KITE_AVX2;
#else
    return KITE_PLAIN;
#endif
}

const kv_kernels *kv_choose(int32_t kernel) {
    int32_t best = kite_best_kernel();
    if (kernel == KITE_BEST) kernel = best;
    if (kernel == KITE_PLAIN) return &kv_plain;
#ifdef KITE_HAS_AVX2
    if (kernel == KITE_AVX2 && best >= KITE_AVX2) return &kv_avx2;
    if (kernel == KITE_AVX512 && best >= KITE_AVX512) return &kv_avx512;
#endif
    return NULL;
}

int kv_make_plan(const kite_kv_shape *shape, kv_plan *plan) {
    const uint64_t most = (uint64_t)1 << 30;
    if (shape->kind != KITE_FLOAT16 && shape->kind != KITE_BFLOAT16) return 0;
    if (!shape->segments || !shape->tokens || !shape->channels) return 0;
    if (shape->segments > most || shape->tokens > most / shape->segments) return 0;
    if (shape->channels > most / (shape->segments * shape->tokens)) return 0;
    plan->segments = shape->segments;
    plan->tokens = shape->tokens;
    plan->channels = shape->channels;
    plan->elements = shape->segments * shape->tokens * shape->channels;
    plan->kind = shape->kind;
    plan->low_bytes =
        plan->elements / CHUNK * kv_chunk_bytes(plan->kind) + plan->elements % CHUNK * kv_rest_bytes(plan->kind);
    return 1;
}

/* K differs much between channels and little between tokens: its first tokens count more than the prior. */
kv_shifts kv_shifts_at(uint64_t token, int second_half) {
    static const int8_t k_level[6] = {1, 1, 2, 2, 2, 3}, v_level[8] = {2, 3, 3, 3, 3, 3, 3, 4};
    static const int8_t sign[6] = {0, 1, 2, 2, 2, 3};
    kv_shifts shifts;
    shifts.level = second_half ? v_level[token < 7 ? token : 7] : k_level[token < 5 ? token : 5];
    shifts.sign = sign[token < 5 ? token : 5];
    return shifts;
}

uint8_t kv_weight_code(uint32_t count, uint32_t highest) {
    if (!count) return 0;
    /* The largest weight that is at most 4/3 of the count's share, in 1024ths of the highest count. */
    uint64_t scaled = (uint64_t)count * 4096, unit = (uint64_t)highest * 3;
    uint8_t code = 1;
    while (code < 15 && scaled >= unit * WEIGHTS[code + 1]) code++;
    return code;
}

int kv_frequencies(const uint8_t *codes, uint16_t *frequencies) {
    uint32_t total = 0, present = 0, before = 0, done = 0;
    for (int i = 0; i < SYMBOLS; i++) {
        total += WEIGHTS[codes[i]];
        present += codes[i] != 0;
    }
    if (!present) return 0;
    for (int i = 0; i < SYMBOLS; i++) {
        before += WEIGHTS[codes[i]];
        uint32_t until = before * (PROB_SUM - present) / total; /* below 2^17 * 2^11 */
        frequencies[i] = (uint16_t)(codes[i] ? until - done + 1 : 0);
        done = until;
    }
    return 1;
}

uint8_t *kv_encode_tail(uint32_t *states, const uint16_t *indices, uint32_t count, const uint32_t *codes,
                        uint8_t *words) {
    for (uint32_t lane = count; lane-- > 0;) {
        const uint32_t *code = codes + 2 * (uint32_t)indices[lane];
        uint32_t state = states[lane], frequency = code[1] >> 16, start = code[1] & 0xffff;
        uint32_t full = state >> (32 - PROB_BITS) >= frequency; /* no branches: they could not be predicted */
        kv_put16(words - 2, state);
        words -= 2 * full;
        state >>= 16 * full;
        uint32_t quotient = (uint32_t)((uint64_t)state * code[0] >> 32), rest = state - quotient * frequency;
        uint32_t more = rest >= frequency; /* the reciprocal is rounded down */
        states[lane] = ((quotient + more) << PROB_BITS) + rest - (frequency & -more) + start;
    }
    return words;
}

int kv_decode_checked(uint32_t *states, const uint8_t *tables, uint32_t count, const uint32_t *slots, kv_reader *words,
                      uint8_t *symbols) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t state = states[i % LANES];
        uint32_t slot = slots[(uint32_t)tables[i] << PROB_BITS | (state & (PROB_SUM - 1))];
        state = (slot >> 20) * (state >> PROB_BITS) + (slot >> 8 & 0xfff);
        if (state < STATE_LOW) {
            if (words->end - words->at < 2) return 0;
            state = state << 16 | kv_get16(words->at);
            words->at += 2;
        }
        states[i % LANES] = state;
        symbols[i] = (uint8_t)slot;
    }
    return 1;
}
