/* The kernel for x86-64 with AVX-512 (F, BW, DQ, VL): as kv_avx2.c, 16 lanes at a time. */
#include "kv.h"

#ifdef KITE_HAS_AVX2

#include <immintrin.h>

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#include "kv_rows.inc"

enum { WIDTH = 16, VECTORS = LANES / WIDTH };

TARGET static void load_states(const uint32_t *states, __m512i *state) {
    for (int i = 0; i < VECTORS; i++) state[i] = _mm512_loadu_si512(states + WIDTH * i);
}

TARGET static void store_states(uint32_t *states, const __m512i *state) {
    for (int i = 0; i < VECTORS; i++) _mm512_storeu_si512(states + WIDTH * i, state[i]);
}

TARGET static uint32_t decode_groups(uint32_t *states, const uint8_t *tables, uint32_t groups, const uint32_t *slots,
                                     kv_reader *words, uint8_t *symbols) {
    const __m512i slot_mask = _mm512_set1_epi32(PROB_SUM - 1), offset_mask = _mm512_set1_epi32(0xfff);
    const __m512i lowest = _mm512_set1_epi32((int)STATE_LOW);
    const uint8_t *at = words->at;
    uint32_t group = 0;
    __m512i state[VECTORS];
    load_states(states, state);
    for (; group < groups && words->end - at >= 2 * LANES; group++) {
        for (int i = 0; i < VECTORS; i++, tables += WIDTH, symbols += WIDTH) {
            __m512i table = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)tables));
            __m512i index =
                _mm512_or_si512(_mm512_slli_epi32(table, PROB_BITS), _mm512_and_si512(state[i], slot_mask));
            __m512i slot = _mm512_i32gather_epi32(index, slots, 4);
            __m512i next = _mm512_add_epi32(
                _mm512_mullo_epi32(_mm512_srli_epi32(slot, 20), _mm512_srli_epi32(state[i], PROB_BITS)),
                _mm512_and_si512(_mm512_srli_epi32(slot, 8), offset_mask));
            _mm_storeu_si128((__m128i *)(void *)symbols, _mm512_cvtepi32_epi8(slot));
            __mmask16 empty = _mm512_cmplt_epu32_mask(next, lowest);
            __m512i fresh = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)at));
            fresh = _mm512_or_si512(_mm512_slli_epi32(next, 16), _mm512_maskz_expand_epi32(empty, fresh));
            state[i] = _mm512_mask_mov_epi32(next, empty, fresh);
            at += 2 * _mm_popcnt_u32(empty);
        }
    }
    store_states(states, state);
    words->at = at;
    return group * LANES;
}

TARGET static uint8_t *encode_groups(uint32_t *states, const uint16_t *indices, uint32_t groups, const uint32_t *codes,
                                     uint8_t *words) {
    const __m512i low_half = _mm512_set1_epi32(0xffff);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512i state[VECTORS];
    load_states(states, state);
    for (uint32_t group = groups; group-- > 0;) {
        for (int i = VECTORS; i-- > 0;) {
            const void *from = indices + group * LANES + WIDTH * (uint32_t)i;
            __m512i index = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
            __m512i some = _mm512_i32gather_epi64(_mm512_castsi512_si256(index), codes, 8);
            __m512i others = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(index, 1), codes, 8);
            __m512i reciprocal = _mm512_permutex2var_epi32(some, even, others);
            __m512i code = _mm512_permutex2var_epi32(some, odd, others);
            __m512i frequency = _mm512_srli_epi32(code, 16), start = _mm512_and_si512(code, low_half);
            __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(state[i], 32 - PROB_BITS), frequency);
            unsigned number = (unsigned)_mm_popcnt_u32(full);
            __m256i out = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, state[i]));
            words -= 2 * number;
            _mm256_mask_storeu_epi16(words, (__mmask16)((1u << number) - 1), out);
            __m512i now = _mm512_mask_srli_epi32(state[i], full, state[i], 16);
            __m512i low = _mm512_srli_epi64(_mm512_mul_epu32(now, reciprocal), 32);
            __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(now, 32), _mm512_srli_epi64(reciprocal, 32));
            __m512i quotient = _mm512_mask_blend_epi32(0xaaaa, low, high);
            __m512i rest = _mm512_sub_epi32(now, _mm512_mullo_epi32(quotient, frequency));
            __mmask16 more = _mm512_cmpge_epu32_mask(rest, frequency); /* the quotient is one too small */
            quotient = _mm512_mask_add_epi32(quotient, more, quotient, _mm512_set1_epi32(1));
            rest = _mm512_mask_sub_epi32(rest, more, rest, frequency);
            state[i] = _mm512_add_epi32(_mm512_slli_epi32(quotient, PROB_BITS), _mm512_add_epi32(rest, start));
        }
    }
    store_states(states, state);
    return words;
}

TARGET static void row_tables(const kv_state *state, uint32_t width, const uint8_t *table_of, uint8_t *tables) {
    kv_avx2.row_tables(state, width, table_of, tables);
}

const kv_kernels kv_avx512 = {highest_avx512, measure_avx512, split_row_avx512, row_tables,    join_row_avx512,
                              pack_low_avx512, merge_low_avx512, encode_groups, decode_groups};

#else
typedef int kv_no_avx512; /* a file must declare something */
#endif
