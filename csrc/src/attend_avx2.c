/* Paged attention for x86-64 with AVX2, FMA and F16C: as attend_avx512.c, 8 lanes at a time. */
#include "attend.h"

#ifdef KITE_ATTEND_X86

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR TARGET static INLINE_ALWAYS
#define ENTRY attend_avx2
#define LANES 8
#define BLOCK 2
#define LINES 6

#define KEEP(value) __asm__("" : "+x"(value)) /* or it would be loaded again for each use */

typedef __m256 vec;

VECTOR vec v_load(const float *from) { return _mm256_loadu_ps(from); }
VECTOR void v_store(float *to, vec value) { _mm256_storeu_ps(to, value); }
VECTOR vec v_set(float value) { return _mm256_set1_ps(value); }
VECTOR vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
VECTOR vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
VECTOR vec v_divide(vec a, vec b) { return _mm256_div_ps(a, b); }
VECTOR vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
VECTOR vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }

VECTOR float v_highest(vec value) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

VECTOR vec v_exp2(vec x) {
    x = _mm256_min_ps(v_set(127.0f), _mm256_max_ps(v_set(-127.0f), x));
    const vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec r = _mm256_sub_ps(x, whole);
    vec y = v_set(EXP2_5);
    y = v_fma(y, r, v_set(EXP2_4));
    y = v_fma(y, r, v_set(EXP2_3));
    y = v_fma(y, r, v_set(EXP2_2));
    y = v_fma(y, r, v_set(EXP2_1));
    y = v_fma(y, r, v_set(1.0f));
    /* The exponent's bits are all 0, so the power is 0, where `whole` is -127. */
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

VECTOR vec v_keep(vec value, int32_t first, int32_t last) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const __m256i kept = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
    return _mm256_blendv_ps(v_set(-INFINITY), value, _mm256_castsi256_ps(kept));
}

VECTOR vec v_widen(int kind, const uint8_t *from) {
    if (kind == KITE_FLOAT32) return _mm256_loadu_ps((const float *)(const void *)from);
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)from);
    if (kind == KITE_FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

VECTOR void v_narrow(int kind, uint8_t *to, vec value) {
    if (kind == KITE_FLOAT32) {
        _mm256_storeu_ps((float *)(void *)to, value);
        return;
    }
    __m128i half;
    if (kind == KITE_FLOAT16) {
        half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else { /* to the nearest, ties to even; what is no number stays none */
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), none), 16);
        half = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    }
    _mm_storeu_si128((__m128i *)(void *)to, half);
}

/* Turns 8 rows of 8 words into 8 columns. */
VECTOR void transpose(__m256i *row) {
    __m256i pair[8], quad[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        quad[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
        quad[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
        quad[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
        quad[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        row[i] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x20);
        row[i + 4] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x31);
    }
}

VECTOR void load_keys(int kind, const uint8_t *const *rows, int32_t dim, float *keys) {
    const int32_t unit = kind == KITE_FLOAT32 ? 8 : 16; /* channels of a vector of words */
    const uint64_t bytes = attend_bytes(kind);
    for (int32_t channel = 0; channel < dim; channel += unit) {
        const uint64_t begin = (uint64_t)channel * bytes;
        __m256i word[8];
        if (dim - channel >= unit) {
            UNROLL for (int i = 0; i < 8; i++)
                word[i] = _mm256_loadu_si256((const __m256i *)(const void *)(rows[i] + begin));
        } else {
            UNROLL for (int i = 0; i < 8; i++) {
                uint8_t some[32] = {0};
                memcpy(some, rows[i] + begin, (uint64_t)(dim - channel) * bytes);
                word[i] = _mm256_loadu_si256((const __m256i *)(const void *)some);
            }
        }
        transpose(word);
        float *to = keys + channel * KEYS;
        UNROLL for (int i = 0; i < 8; i++) {
            if (kind == KITE_FLOAT32) {
                v_store(to + i * KEYS, _mm256_castsi256_ps(word[i]));
                continue;
            }
            const __m256i high = _mm256_and_si256(word[i], _mm256_set1_epi32((int)0xffff0000));
            const __m256i low = _mm256_slli_epi32(word[i], 16);
            vec even = _mm256_castsi256_ps(low), odd = _mm256_castsi256_ps(high);
            if (kind == KITE_FLOAT16) {
                const __m256i lows = _mm256_srli_epi32(low, 16), highs = _mm256_srli_epi32(high, 16);
                even = _mm256_cvtph_ps(
                    _mm_packus_epi32(_mm256_castsi256_si128(lows), _mm256_extracti128_si256(lows, 1)));
                odd = _mm256_cvtph_ps(
                    _mm_packus_epi32(_mm256_castsi256_si128(highs), _mm256_extracti128_si256(highs, 1)));
            }
            v_store(to + 2 * i * KEYS, even);
            v_store(to + (2 * i + 1) * KEYS, odd);
        }
    }
}

#include "attend.inc"

#else
typedef int attend_no_avx2; /* a file must declare something */
#endif
