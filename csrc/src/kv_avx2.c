/* The kernel for x86-64 with AVX2. rANS with vector gathers after Giesen, "Interleaved entropy coders" (2014). */
#include "kv.h"

#ifdef KITE_HAS_AVX2

#include <immintrin.h>

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,popcnt")))
#include "kv_rows.inc"

/* Byte shuffles of 8 words. expand[m]: the next words of the stream, given to the lanes in m. compact[m]: the words of
 * the lanes in m, moved to the end. */
static uint8_t expand[256][16] __attribute__((aligned(64))), compact[256][16] __attribute__((aligned(64)));

__attribute__((constructor)) static void fill_shuffles(void) {
    for (int mask = 0; mask < 256; mask++) {
        int place = 8 - __builtin_popcount((unsigned)mask), seen = 0;
        for (int lane = 0; lane < 8; lane++) {
            if (!(mask >> lane & 1)) continue;
            for (int half = 0; half < 2; half++) {
                expand[mask][2 * lane + half] = (uint8_t)(2 * seen + half);
                compact[mask][2 * (place + seen) + half] = (uint8_t)(2 * lane + half);
            }
            seen++;
        }
    }
}

TARGET static inline __m256i look_up(__m256i index, const __m256i *table) {
    /* 64 bytes, 16 at a time: a shuffle takes the low 4 bits, and gives 0 where the top bit is set. */
    __m256i high = _mm256_srli_epi16(_mm256_and_si256(index, _mm256_set1_epi8(0x30)), 4);
    __m256i low = _mm256_and_si256(index, _mm256_set1_epi8(15)), result = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        __m256i here = _mm256_cmpeq_epi8(high, _mm256_set1_epi8((char)i));
        result = _mm256_or_si256(result, _mm256_and_si256(here, _mm256_shuffle_epi8(table[i], low)));
    }
    return result;
}

TARGET static inline void load_table_of(const uint8_t *table_of, __m256i *table) {
    for (int i = 0; i < 4; i++)
        table[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(table_of + 16 * i)));
}

TARGET static void row_tables(const kv_state *state, uint32_t width, const uint8_t *table_of, uint8_t *tables) {
    __m256i table[4];
    load_table_of(table_of, table);
    uint8_t contexts[TILE];
    for (uint32_t i = 0; i < width; i++) contexts[i] = (uint8_t)context_of_avx2(state->level[i], state->sign[i]);
    uint32_t i = 0;
    for (; i + 32 <= width; i += 32) {
        __m256i index = _mm256_loadu_si256((const __m256i *)(const void *)(contexts + i));
        _mm256_storeu_si256((__m256i *)(void *)(tables + i), look_up(index, table));
    }
    for (; i < width; i++) tables[i] = table_of[contexts[i]];
}

TARGET static inline __m256i widen(const uint8_t *bytes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)bytes));
}

TARGET static inline __m256i below_low(__m256i state) {
    return _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
}

TARGET static inline int lanes_of(__m256i mask) { return _mm256_movemask_ps(_mm256_castsi256_ps(mask)); }

TARGET static inline __m128i shuffle(__m128i words, const uint8_t *order) {
    return _mm_shuffle_epi8(words, _mm_load_si128((const __m128i *)(const void *)order));
}

TARGET static uint32_t decode_groups(uint32_t *states, const uint8_t *tables, uint32_t groups, const uint32_t *slots,
                                     kv_reader *words, uint8_t *symbols) {
    const __m256i slot_mask = _mm256_set1_epi32(PROB_SUM - 1), offset_mask = _mm256_set1_epi32(0xfff);
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                          -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const uint8_t *at = words->at;
    uint32_t group = 0;
    __m256i state[4];
    for (int i = 0; i < 4; i++) state[i] = _mm256_loadu_si256((const __m256i *)(const void *)(states + 8 * i));
    for (; group < groups && words->end - at >= 2 * LANES; group++) {
        for (int i = 0; i < 4; i++) {
            __m256i index = _mm256_add_epi32(_mm256_slli_epi32(widen(tables + 8 * i), PROB_BITS),
                                             _mm256_and_si256(state[i], slot_mask));
            __m256i slot = _mm256_i32gather_epi32((const int *)(const void *)slots, index, 4);
            __m256i next = _mm256_add_epi32(
                _mm256_mullo_epi32(_mm256_srli_epi32(slot, 20), _mm256_srli_epi32(state[i], PROB_BITS)),
                _mm256_and_si256(_mm256_srli_epi32(slot, 8), offset_mask));
            __m256i bytes = _mm256_shuffle_epi8(slot, pick);
            uint32_t first = (uint32_t)_mm256_extract_epi32(bytes, 0), second = (uint32_t)_mm256_extract_epi32(bytes, 4);
            memcpy(symbols + 8 * i, &first, 4);
            memcpy(symbols + 8 * i + 4, &second, 4);
            __m256i short_of = below_low(next);
            int mask = lanes_of(short_of);
            __m128i taken = shuffle(_mm_loadu_si128((const __m128i *)(const void *)at), expand[mask]);
            __m256i fresh = _mm256_or_si256(_mm256_slli_epi32(next, 16), _mm256_cvtepu16_epi32(taken));
            state[i] = _mm256_blendv_epi8(next, fresh, short_of);
            at += 2 * _mm_popcnt_u32((unsigned)mask);
        }
        tables += LANES;
        symbols += LANES;
    }
    for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)(void *)(states + 8 * i), state[i]);
    words->at = at;
    return group * LANES;
}

/* The high halves of the products of unsigned lanes. */
TARGET static inline __m256i multiply_high(__m256i a, __m256i b) {
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xaa);
}

TARGET static uint8_t *encode_groups(uint32_t *states, const uint16_t *indices, uint32_t groups, const uint32_t *codes,
                                     uint8_t *words) {
    const __m256i low_half = _mm256_set1_epi32(0xffff);
    __m256i state[4];
    for (int i = 0; i < 4; i++) state[i] = _mm256_loadu_si256((const __m256i *)(const void *)(states + 8 * i));
    for (uint32_t group = groups; group-- > 0;) {
        for (int i = 3; i >= 0; i--) {
            /* Lanes 0, 1, 4, 5 and lanes 2, 3, 6, 7, so that the halves of the codes come out in order. */
            const void *from = indices + group * LANES + 8 * i;
            __m128i index = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)from), 0xd8);
            __m128i second = _mm_cvtepu16_epi32(_mm_unpackhi_epi64(index, index));
            const long long *at = (const long long *)(const void *)codes;
            __m256 some = _mm256_castsi256_ps(_mm256_i32gather_epi64(at, _mm_cvtepu16_epi32(index), 8));
            __m256 others = _mm256_castsi256_ps(_mm256_i32gather_epi64(at, second, 8));
            __m256i reciprocal = _mm256_castps_si256(_mm256_shuffle_ps(some, others, 0x88));
            __m256i code = _mm256_castps_si256(_mm256_shuffle_ps(some, others, 0xdd));
            __m256i frequency = _mm256_srli_epi32(code, 16), start = _mm256_and_si256(code, low_half);
            /* Both sides are below 2^31, so that the signed comparison holds. */
            __m256i fits = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(state[i], 32 - PROB_BITS));
            unsigned mask = (unsigned)lanes_of(fits) ^ 255;
            __m256i halves = _mm256_and_si256(state[i], low_half);
            __m128i out =
                _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
            /* All 8 words are stored, the wanted ones last; what lies below is written later. */
            _mm_storeu_si128((__m128i *)(void *)(words - 16), shuffle(out, compact[mask]));
            words -= 2 * _mm_popcnt_u32(mask);
            __m256i now = _mm256_blendv_epi8(_mm256_srli_epi32(state[i], 16), state[i], fits);
            __m256i quotient = multiply_high(now, reciprocal);
            __m256i rest = _mm256_sub_epi32(now, _mm256_mullo_epi32(quotient, frequency));
            __m256i more = _mm256_cmpgt_epi32(frequency, rest); /* 0 where the quotient is one too small */
            more = _mm256_andnot_si256(more, _mm256_set1_epi32(-1));
            quotient = _mm256_sub_epi32(quotient, more);
            rest = _mm256_sub_epi32(rest, _mm256_and_si256(more, frequency));
            state[i] = _mm256_add_epi32(_mm256_slli_epi32(quotient, PROB_BITS), _mm256_add_epi32(rest, start));
        }
    }
    for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)(void *)(states + 8 * i), state[i]);
    return words;
}

const kv_kernels kv_avx2 = {highest_avx2, measure_avx2, split_row_avx2, row_tables,    join_row_avx2,
                            pack_low_avx2, merge_low_avx2, encode_groups, decode_groups};

#else
typedef int kv_no_avx2; /* a file must declare something */
#endif
