/* The kernel that every CPU runs. */
#include "kv.h"

#define NAME(x) x##_plain
#define TARGET
#include "kv_rows.inc"

static void row_tables(const kv_state *state, uint32_t width, const uint8_t *table_of, uint8_t *tables) {
    for (uint32_t i = 0; i < width; i++) tables[i] = table_of[context_of_plain(state->level[i], state->sign[i])];
}

static uint8_t *encode_groups(uint32_t *states, const uint16_t *indices, uint32_t groups, const uint32_t *codes,
                              uint8_t *words) {
    while (groups-- > 0) words = kv_encode_tail(states, indices + groups * LANES, LANES, codes, words);
    return words;
}

static uint32_t decode_groups(uint32_t *states, const uint8_t *tables, uint32_t groups, const uint32_t *slots,
                              kv_reader *words, uint8_t *symbols) {
    uint32_t group = 0;
    for (; group < groups && words->end - words->at >= 2 * LANES; group++) {
        const uint8_t *at = words->at;
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint32_t state = states[lane];
            uint32_t slot = slots[(uint32_t)*tables++ << PROB_BITS | (state & (PROB_SUM - 1))];
            state = (slot >> 20) * (state >> PROB_BITS) + (slot >> 8 & 0xfff);
            uint32_t refill = state < STATE_LOW; /* no branch: it could not be predicted */
            states[lane] = state << 16 * refill | (kv_get16(at) & -refill);
            at += 2 * refill;
            *symbols++ = (uint8_t)slot;
        }
        words->at = at;
    }
    return group * LANES;
}

const kv_kernels kv_plain = {highest_plain, measure_plain, split_row_plain, row_tables,    join_row_plain,
                             pack_low_plain, merge_low_plain, encode_groups, decode_groups};
