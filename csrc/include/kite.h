/* The native part of kitelib: a C ABI without dependencies.
 *
 * Every function is pure: it keeps no state between calls, allocates nothing, and may run in any number of threads at
 * once. Buffers and scratch memory belong to the caller. Compressed bodies are specified in docs/format.md.
 */
#ifndef KITE_H
#define KITE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KITE_API __declspec(dllexport)
#else
#define KITE_API __attribute__((visibility("default")))
#endif

/* Grows whenever a function below changes; a loader refuses a library that gives another number. */
#define KITE_ABI 1

/* What a function gives back instead of a size or zero. */
enum {
    KITE_BAD_ARGUMENT = -1, /* the caller is at fault: shape, sizes, element kind or kernel */
    KITE_DAMAGED = -2       /* the body is not what an encoder writes for this shape */
};

/* Element kinds: the number of mantissa bits. */
enum { KITE_BFLOAT16 = 7, KITE_FLOAT16 = 10 };

/* Which machine code runs. All give the same bytes. KITE_BEST takes the fastest that this CPU has. */
enum { KITE_BEST = -1, KITE_PLAIN = 0, KITE_AVX2 = 1, KITE_AVX512 = 2 };

KITE_API uint32_t kite_abi(void);

/* The kernel that KITE_BEST stands for on this CPU. */
KITE_API int32_t kite_best_kernel(void);

/* A block of 16-bit floats, C-contiguous, of shape (segments, tokens, channels); any of them at least 1, and at most
 * 2^30 elements in all. */
typedef struct {
    uint64_t segments, tokens, channels;
    int32_t kind;   /* KITE_BFLOAT16 or KITE_FLOAT16 */
    int32_t kernel; /* KITE_BEST, ... */
} kite_kv_shape;

/* Bytes of output space and of scratch that encoding needs, and of scratch that decoding needs; 0 for a bad shape. */
KITE_API uint64_t kite_kv_encode_bound(const kite_kv_shape *shape);
KITE_API uint64_t kite_kv_encode_scratch(const kite_kv_shape *shape);
KITE_API uint64_t kite_kv_decode_scratch(const kite_kv_shape *shape);

/* Compresses `data` into `body`. `scratch` is aligned to 64 bytes, `data` to 2.
 *
 * Returns the bytes written; 0 if the data does not get smaller than it is; or KITE_BAD_ARGUMENT. */
KITE_API int64_t kite_kv_encode(const kite_kv_shape *shape, const uint16_t *data, uint8_t *body, uint64_t body_space,
                                uint8_t *scratch, uint64_t scratch_bytes);

/* Restores exactly the elements of `shape` from a body of any origin: whatever it holds, nothing is read outside of it,
 * nothing is written outside of `data` and `scratch`, and the time is linear in the number of elements.
 *
 * Returns 0, KITE_BAD_ARGUMENT or KITE_DAMAGED; then `data` holds anything. */
KITE_API int64_t kite_kv_decode(const kite_kv_shape *shape, const uint8_t *body, uint64_t body_bytes, uint16_t *data,
                                uint8_t *scratch, uint64_t scratch_bytes);

/* Attention over a paged KV cache, one layer of one step.
 *
 * All element strides count elements; the channels of a head are next to each other. Rows of a sequence are neighbours
 * and sequences follow each other; its last row is the last token of its context. A row attends to the tokens of its
 * sequence up to and including its own. What a row gives depends on nothing but its own query and those tokens: not on
 * the other rows, the blocks, the items or the threads; it may differ between kernels. */
enum { KITE_FLOAT32 = 23 };

/* Calls `work(data)` on up to `threads` threads at once, the caller's among them, and returns when all are done: the
 * signature of GOMP_parallel. */
typedef void (*kite_run)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    const void *query, *key, *value; /* (rows, heads, channels) */
    void *out;                       /* (rows, query_heads, value_dim), contiguous */
    void *key_pages, *value_pages;   /* (blocks, block_tokens, kv_heads, channels), contiguous within a block */
    int64_t query_row, query_head, key_row, key_head, value_row, value_head, key_block, value_block; /* strides */
    const int64_t *slots;      /* (rows): block * block_tokens + offset where a row's KV goes; negative: nowhere */
    const int32_t *row_starts; /* (sequences + 1); rows from the last one on are padding, whose output is 0 */
    const int32_t *contexts;   /* (sequences): tokens, this step's rows included */
    const int32_t *tables;     /* (sequences, table_width): blocks in order */
    const int32_t *items;      /* (num_items, 3): sequence, its first row (0: the sequence's first), number of rows */
    uint8_t *scratch;          /* aligned to 64 bytes */
    uint64_t scratch_bytes;    /* at least kite_attend_scratch() for each of the threads */
    kite_run run;              /* NULL: all on the calling thread */
    int64_t table_width;
    int32_t rows, num_sequences, num_items;
    int32_t item_rows, item_heads; /* most rows of an item; KV heads done with it at once, by one thread */
    int32_t block_tokens, query_heads, kv_heads, key_dim, value_dim;
    int32_t window;  /* a row sees so many tokens, itself included; 0: all */
    int32_t kind;    /* of all elements */
    int32_t kernel;  /* KITE_BEST, ... */
    int32_t threads; /* at least 1 */
    float scale, softcap;
} kite_attention;

/* Bytes of scratch that one thread needs, a multiple of 64. Only head sizes, head counts and item sizes matter. */
KITE_API uint64_t kite_attend_scratch(const kite_attention *call);

/* Writes the rows' KV to their pages, then attends. The items must cover each row that is not padding once. Returns 0
 * or KITE_BAD_ARGUMENT; indices in the arrays are the caller's word. */
KITE_API int64_t kite_attend(const kite_attention *call);

#ifdef __cplusplus
}
#endif

#endif
