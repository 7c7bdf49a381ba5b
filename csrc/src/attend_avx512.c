/* Paged attention for x86-64 with AVX-512 (F, BW, DQ, VL). */
#include "attend.h"

#ifdef KITE_ATTEND_X86

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#define VECTOR TARGET static INLINE_ALWAYS
#define ENTRY attend_avx512
#define LANES 16
#define BLOCK 4
#define LINES 6

#define KEEP(value) __asm__("" : "+v"(value)) /* or it would be loaded again for each use */

typedef __m512 vec;

VECTOR vec v_load(const float *from) { return _mm512_loadu_ps(from); }
VECTOR void v_store(float *to, vec value) { _mm512_storeu_ps(to, value); }
VECTOR vec v_set(float value) { return _mm512_set1_ps(value); }
VECTOR vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
VECTOR vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
VECTOR vec v_divide(vec a, vec b) { return _mm512_div_ps(a, b); }
VECTOR vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
VECTOR vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
VECTOR float v_highest(vec value) { return _mm512_reduce_max_ps(value); }

VECTOR vec v_exp2(vec x) {
    x = v_max(v_set(-160.0f), x);
    const vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec r = _mm512_sub_ps(x, whole);
    vec y = v_set(EXP2_5);
    y = v_fma(y, r, v_set(EXP2_4));
    y = v_fma(y, r, v_set(EXP2_3));
    y = v_fma(y, r, v_set(EXP2_2));
    y = v_fma(y, r, v_set(EXP2_1));
    y = v_fma(y, r, v_set(1.0f));
    return _mm512_scalef_ps(y, whole);
}

VECTOR vec v_keep(vec value, int32_t first, int32_t last) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 kept = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                           _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
    return _mm512_mask_mov_ps(v_set(-INFINITY), kept, value);
}

VECTOR vec v_widen(int kind, const uint8_t *from) {
    if (kind == KITE_FLOAT32) return _mm512_loadu_ps(from);
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)from);
    if (kind == KITE_FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

VECTOR void v_narrow(int kind, uint8_t *to, vec value) {
    if (kind == KITE_FLOAT32) {
        _mm512_storeu_ps(to, value);
        return;
    }
    __m256i half;
    if (kind == KITE_FLOAT16) {
        half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else { /* to the nearest, ties to even; what is no number stays none */
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 none = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        rounded = _mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc00000));
        half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
    _mm256_storeu_si256((__m256i *)(void *)to, half);
}

/* Turns 16 rows of 16 words into 16 columns. */
VECTOR void transpose(__m512i *row) {
    __m512i pair[16], quad[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        pair[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        pair[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        quad[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
        quad[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
        quad[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
        quad[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(quad[i], quad[i + 4], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(quad[i + 8], quad[i + 12], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(quad[i], quad[i + 4], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(quad[i + 8], quad[i + 12], 0xdd);
        row[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        row[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        row[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

VECTOR void load_keys(int kind, const uint8_t *const *rows, int32_t dim, float *keys) {
    const int32_t unit = kind == KITE_FLOAT32 ? 16 : 32; /* channels of a vector of words */
    for (int32_t channel = 0; channel < dim; channel += unit) {
        const int32_t left = dim - channel;
        const uint64_t bytes = (uint64_t)(left < unit ? left : unit) * attend_bytes(kind);
        const __mmask32 mask = (__mmask32)(((uint64_t)1 << bytes / 2) - 1); /* in units of two bytes */
        __m512i word[16];
        UNROLL for (int i = 0; i < 16; i++)
            word[i] = _mm512_maskz_loadu_epi16(mask, rows[i] + (uint64_t)channel * attend_bytes(kind));
        transpose(word);
        float *to = keys + channel * KEYS;
        UNROLL for (int i = 0; i < 16; i++) {
            if (kind == KITE_FLOAT32) {
                v_store(to + i * KEYS, _mm512_castsi512_ps(word[i]));
                continue;
            }
            vec even, odd;
            if (kind == KITE_FLOAT16) {
                even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word[i]));
                odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(word[i], 16)));
            } else {
                even = _mm512_castsi512_ps(_mm512_slli_epi32(word[i], 16));
                odd = _mm512_castsi512_ps(_mm512_and_si512(word[i], _mm512_set1_epi32((int)0xffff0000)));
            }
            v_store(to + 2 * i * KEYS, even);
            v_store(to + (2 * i + 1) * KEYS, odd);
        }
    }
}

#include "attend.inc"

#else
typedef int attend_no_avx512; /* a file must declare something */
#endif
