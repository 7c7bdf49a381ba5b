/* What the files of paged attention share. */
#ifndef KITE_ATTEND_H
#define KITE_ATTEND_H

#include <math.h>
#include <string.h>

#include "../include/kite.h"

enum {
    KEYS = 64,     /* keys of a tile; tiles start at multiples of it, whatever the blocks are */
    DIM_UNIT = 32, /* buffers have room for a multiple of so many channels */
    MAX_DIM = 4096
};

/* 2^r for r from -1/2 to 1/2: 1 + r (EXP2_1 + r (EXP2_2 + ...)), relative error below 2e-7. */
#define EXP2_1 0x1.62e42ap-1f
#define EXP2_2 0x1.ebf9bcp-3f
#define EXP2_3 0x1.c6b752p-5f
#define EXP2_4 0x1.3cea88p-7f
#define EXP2_5 0x1.5bba14p-10f

#ifdef __GNUC__
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE_ALWAYS inline __attribute__((always_inline))
#else
#define UNROLL
#define INLINE_ALWAYS inline
#endif

/* Where the keys and values of a tile are. */
typedef struct {
    const uint8_t *keys[KEYS], *values[KEYS];
    int32_t first, last;
} attend_rows;

/* One item: `rows` rows of a sequence and `heads` KV heads, each with `group` query heads. */
typedef struct {
    const kite_attention *call;
    const int32_t *table;
    int64_t first_row; /* in the step */
    int32_t position;  /* of the first row */
    int32_t rows, group, head, heads; /* head: the first one */
    /* Scratch. A line is one query head of one row. Lines are ordered by KV head, then row, then query head. */
    float *queries; /* (lines, key_dim), times the scale */
    float *sums;    /* (lines, value_stride): values times weights so far */
    float *weights; /* (lines, 16): weights so far, lane by lane */
    float *highest; /* (lines): highest score so far */
    float *keys;    /* (key_dim, KEYS) */
    float *values;  /* (KEYS, value_stride) */
    float *scores;  /* (lines at a time, KEYS) */
    int32_t value_stride;
} attend_work;

/* `next` is what this thread does afterwards, or NULL: a kernel may ask for its first tile ahead of time. */
typedef void (*attend_kernel)(const attend_work *work, const attend_work *next);

void attend_plain(const attend_work *work, const attend_work *next);
#if defined(__x86_64__) && defined(__GNUC__)
#define KITE_ATTEND_X86 1
void attend_avx2(const attend_work *work, const attend_work *next);
void attend_avx512(const attend_work *work, const attend_work *next);
#endif

static inline int32_t attend_round(int32_t dim) { return (dim + DIM_UNIT - 1) / DIM_UNIT * DIM_UNIT; }
static inline int32_t attend_low(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t attend_high(int32_t a, int32_t b) { return a > b ? a : b; }
static inline uint32_t attend_bytes(int32_t kind) { return kind == KITE_FLOAT32 ? 4 : 2; }

/* First token that any row of the item sees. */
static inline int32_t attend_lowest(const attend_work *work) {
    return work->call->window ? attend_high(0, work->position - work->call->window + 1) : 0;
}

/* Asks for part `part` of `parts` of the rows, all heads of the item. */
static inline void attend_prefetch(const attend_work *work, const attend_rows *rows, int32_t part, int32_t parts) {
#ifdef __GNUC__
    const uint64_t bytes = attend_bytes(work->call->kind) * (uint64_t)work->heads;
    const uint64_t key_bytes = bytes * (uint64_t)work->call->key_dim, value_bytes = bytes * (uint64_t)work->call->value_dim;
    const int32_t count = rows->last - rows->first, end = rows->first + count * (part + 1) / parts;
    for (int32_t i = rows->first + count * part / parts; i < end; i++) {
        /* Not into L1: it is full. */
        for (uint64_t at = 0; at < key_bytes; at += 64) __builtin_prefetch(rows->keys[i] + at, 0, 2);
        for (uint64_t at = 0; at < value_bytes; at += 64) __builtin_prefetch(rows->values[i] + at, 0, 2);
    }
#else
    (void)work, (void)rows, (void)part, (void)parts;
#endif
}

/* Fills in where the tokens of the tile at `start` are that the item sees, for its first head. Other places repeat the
 * nearest. */
static inline void attend_find(const attend_work *work, int32_t start, attend_rows *rows) {
    const int32_t first = attend_high(0, attend_lowest(work) - start);
    const int32_t last = attend_low(KEYS, work->position + work->rows - start);
    const kite_attention *call = work->call;
    const uint64_t bytes = attend_bytes(call->kind);
    const uint64_t key_head = (uint64_t)call->key_dim * bytes, value_head = (uint64_t)call->value_dim * bytes;
    const uint64_t key_token = key_head * (uint64_t)call->kv_heads, value_token = value_head * (uint64_t)call->kv_heads;
    const int32_t tokens = call->block_tokens;
    int32_t block = (start + first) / tokens, offset = (start + first) % tokens, at = first;
    while (at < last) {
        const uint64_t number = (uint64_t)work->table[block++];
        const uint8_t *key = (const uint8_t *)call->key_pages + number * (uint64_t)call->key_block * bytes;
        const uint8_t *value = (const uint8_t *)call->value_pages + number * (uint64_t)call->value_block * bytes;
        key += (uint64_t)offset * key_token + (uint64_t)work->head * key_head;
        value += (uint64_t)offset * value_token + (uint64_t)work->head * value_head;
        for (; at < last && offset < tokens; at++, offset++, key += key_token, value += value_token) {
            rows->keys[at] = key;
            rows->values[at] = value;
        }
        offset = 0;
    }
    for (at = 0; at < first; at++) rows->keys[at] = rows->keys[first];
    for (at = last; at < KEYS; at++) rows->keys[at] = rows->keys[last - 1];
    for (at = 0; at < first; at++) rows->values[at] = rows->values[first];
    for (at = last; at < KEYS; at++) rows->values[at] = rows->values[last - 1];
    rows->first = first;
    rows->last = last;
}

/* From one head to the next. */
static inline void attend_advance(const attend_work *work, attend_rows *rows) {
    const uint64_t bytes = attend_bytes(work->call->kind);
    for (int i = 0; i < KEYS; i++) {
        rows->keys[i] += bytes * (uint64_t)work->call->key_dim;
        rows->values[i] += bytes * (uint64_t)work->call->value_dim;
    }
}

#endif
