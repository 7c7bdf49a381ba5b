/* What the files of the KV codec share. docs/format.md describes the algorithm and every constant. */
#ifndef KITE_KV_H
#define KITE_KV_H

#include <string.h>

#include "../include/kite.h"

enum {
    LANES = 32,      /* interleaved rANS states */
    PROB_BITS = 11,  /* probabilities are multiples of 2^-11 */
    PROB_SUM = 1 << PROB_BITS,
    TILE = 256,      /* most channels of a row; longer ones are cut */
    SYMBOLS = 128,   /* sign, 5 bits of exponent, the first mantissa bit */
    CONTEXTS = 64,   /* 2 confidences times 32 exponents */
    LEVELS = 32,     /* exponents a unit can name; 0 stands for all others */
    CHUNK = 256,     /* elements whose low bits are packed together */
    HEAD_BYTES = 20, /* low, reserved, escapes, words, table starts */
    STATE_BYTES = 4 * LANES,
    MAX_TABLE_BYTES = 2 * (2 + LEVELS),
    MAX_PRIOR = 8 * (LEVELS - 1),
    SURE = 40 /* sign states at least this far from 0 use the second half of the contexts */
};
#define STATE_LOW (1u << 16)

/* Sizes that follow from a shape. */
typedef struct {
    uint64_t elements, segments, tokens, channels;
    uint64_t low_bytes; /* of the packed low bits */
    int kind;
} kv_plan;

/* How a state moves at a token: by a difference shifted right by so many bits. */
typedef struct {
    int level, sign;
} kv_shifts;

/* One row: the same token in up to TILE channels of one segment. */
typedef struct {
    int16_t level[TILE]; /* expected exponent level, in 16ths */
    int16_t sign[TILE];  /* -64 (always negative) to 64 */
} kv_state;

/* Reads the renormalisation words of a stream without passing its end. */
typedef struct {
    const uint8_t *at, *end;
} kv_reader;

typedef struct {
    int (*highest)(const uint16_t *data, uint64_t count, int kind); /* exponent */
    /* Adds the levels, and the number of elements that have none, to `sum` and `escapes`. */
    void (*measure)(const uint16_t *data, uint64_t count, int kind, int low, uint64_t *sum, uint64_t *escapes);
    /* Gives context * SYMBOLS + symbol of each element, and how many have no level. */
    uint32_t (*split_row)(const uint16_t *row, uint32_t width, int kind, int low, kv_state *state, kv_shifts shifts,
                          uint16_t *indices);
    void (*row_tables)(const kv_state *state, uint32_t width, const uint8_t *table_of, uint8_t *tables);
    uint32_t (*join_row)(const uint8_t *symbols, uint32_t width, int kind, int low, kv_state *state, kv_shifts shifts,
                         uint16_t *row);
    void (*pack_low)(const uint16_t *data, uint64_t chunks, int kind, uint8_t *packed);
    void (*merge_low)(const uint8_t *packed, uint64_t chunks, int kind, uint16_t *data);
    /* Codes full groups of LANES symbols. Decoding stops early where fewer than LANES words are left, and returns how
     * many symbols it did. */
    uint8_t *(*encode_groups)(uint32_t *states, const uint16_t *indices, uint32_t groups, const uint32_t *codes,
                              uint8_t *words);
    uint32_t (*decode_groups)(uint32_t *states, const uint8_t *tables, uint32_t groups, const uint32_t *slots,
                              kv_reader *words, uint8_t *symbols);
} kv_kernels;

extern const kv_kernels kv_plain;
#if defined(__x86_64__) && defined(__GNUC__)
#define KITE_HAS_AVX2 1
extern const kv_kernels kv_avx2, kv_avx512;
#endif

/* Returns 0 for a shape or kernel that can't be. */
int kv_make_plan(const kite_kv_shape *shape, kv_plan *plan);
const kv_kernels *kv_choose(int32_t kernel);

/* The shifts at a token, for a segment of the first (K) or second (V) half. */
kv_shifts kv_shifts_at(uint64_t token, int second_half);

/* Turns weight codes (0 absent, 1 to 15) into frequencies that add up to PROB_SUM; returns 0 if all are absent. */
int kv_frequencies(const uint8_t *codes, uint16_t *frequencies);
uint8_t kv_weight_code(uint32_t count, uint32_t highest);

/* Symbols that don't fill a group; the last group of a row. */
uint8_t *kv_encode_tail(uint32_t *states, const uint16_t *indices, uint32_t count, const uint32_t *codes,
                        uint8_t *words);
/* Any number of symbols from lane 0 on, with every read checked; returns 0 where words are missing. */
int kv_decode_checked(uint32_t *states, const uint8_t *tables, uint32_t count, const uint32_t *slots, kv_reader *words,
                      uint8_t *symbols);

static inline uint16_t kv_get16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
static inline uint32_t kv_get32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}
static inline uint64_t kv_get64(const uint8_t *at) { return kv_get32(at) | (uint64_t)kv_get32(at + 4) << 32; }
static inline void kv_put16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}
static inline void kv_put32(uint8_t *at, uint32_t value) {
    kv_put16(at, value);
    kv_put16(at + 2, value >> 16);
}
static inline void kv_put64(uint8_t *at, uint64_t value) {
    kv_put32(at, (uint32_t)value);
    kv_put32(at + 4, (uint32_t)(value >> 32));
}

/* Bytes of a row's or chunk's low bits. */
static inline uint32_t kv_chunk_bytes(int kind) { return kind == KITE_FLOAT16 ? 288 : 192; }
static inline uint32_t kv_rest_bytes(int kind) { return kind == KITE_FLOAT16 ? 2 : 1; }
static inline uint32_t kv_exponent_mask(int kind) { return kind == KITE_FLOAT16 ? 31 : 255; }
/* The levels must not reach past the highest exponent. */
static inline int kv_max_low(int kind) { return (int)kv_exponent_mask(kind) - (LEVELS - 2); }
static inline uint32_t kv_low_mask(int kind) { return (1u << (kind - 1)) - 1; }

#endif
