/* Moves the pages of a paged KV cache to contiguous memory and back. A C ABI without dependencies, next to kite.h.
 *
 * A cache has numbered blocks; a block holds `block_tokens` tokens, and for each of them `num_segments` pieces (K of
 * every layer, then V of every layer). The pieces may lie in one tensor per layer or in one for all: a segment says
 * where its piece of block 0 starts and how far the next block is. Within a block and segment the tokens follow each
 * other without gaps.
 *
 * Packed forms of a block of T tokens and S segments, N elements of E bytes in all:
 *
 * KITE_RAW     the elements in the order (segment, token, channel).
 * KITE_PLANES  the same elements split into bytes: byte 0 of all N elements, then byte 1, and so on: what the codec
 *              `paged_kvcache_v2/zstd` compresses, and stores after its table where that does not pay.
 * KITE_INT8    what the codec `int8_kv/none` stores: 8 bytes of head (all 0), the scales in the elements'
 *              type, one integer per element. Lossy. 16-bit floats only, all segments as wide.
 * KITE_FP8     like KITE_INT8, but byte 1 of the head is 1, and an element is stored as the float8_e4m3fn nearest to
 *              element / scale * 448.
 *
 * Checksum of n bytes, all modulo 2^64: with the bytes as 64-bit little-endian words w[0], w[1], ... (the last filled
 * up with zeros), A = 0x9E3779B97F4A7C15, B = 0xD6E8FEB86659FD93, and
 *     mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
 * it is mix(n * B + sum over i of mix(w[i] ^ (i + 1) * A)). It can be computed in any order and in parallel, and any
 * change within one word changes it. It finds accidents, not forgeries.
 */
#ifndef KITE_PAGES_H
#define KITE_PAGES_H

#include "kite.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Grows whenever something below changes; a loader refuses a library that gives another number. */
#define KITE_PAGES_ABI 1

enum { KITE_RAW = 0, KITE_PLANES = 1, KITE_INT8 = 2, KITE_FP8 = 3 };

/* A status like KITE_DAMAGED: a lossy form can't hold values that are not finite. */
enum { KITE_NOT_FINITE = -3 };

typedef struct {
    uint8_t *base;         /* token 0 of block 0 */
    uint64_t block_stride; /* bytes from a block to the next */
    uint64_t token_bytes;  /* bytes of a token, at least 1, a multiple of item_bytes */
    uint64_t before;       /* sum of token_bytes of all segments before this one */
} kite_page_segment;

typedef struct {
    const kite_page_segment *segments;
    uint64_t num_segments; /* 1 to 65535 */
    uint64_t num_blocks;
    uint32_t block_tokens;
    uint32_t item_bytes; /* bytes of an element: 1, 2, 4 or 8 */
    int32_t kind;        /* KITE_BFLOAT16 or KITE_FLOAT16; looked at in the lossy forms only */
    int32_t form;        /* KITE_RAW, ... */
} kite_page_layout;

/* Tokens first .. first + tokens - 1 of a block, and where their packed form is. In the lossy forms `packed` is aligned
 * to 2. */
typedef struct {
    uint64_t block;
    uint32_t first, tokens;
    uint8_t *packed;
    uint64_t packed_bytes; /* exactly kite_page_bytes */
} kite_page_item;

typedef struct {
    uint64_t checksum; /* of the packed bytes */
    int64_t status;    /* 0, KITE_NOT_FINITE (packing) or KITE_DAMAGED (unpacking): only in lossy forms */
} kite_page_result;

/* Calls fn(data) in up to `threads` threads at once, the calling one among them, and comes back when all are done; what
 * GOMP_parallel of GCC's OpenMP library does. */
typedef void (*kite_runner)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);

KITE_API uint32_t kite_pages_abi(void);

/* Bytes of `tokens` packed tokens; 0 for a layout or a number that makes no sense. */
KITE_API uint64_t kite_page_bytes(const kite_page_layout *layout, uint32_t tokens);

/* Packs or unpacks every item. `results` (one per item) may be NULL: then nothing is summed and a bad status is only in
 * what the function gives back. Packed items must not overlap; unpacked ones must not share tokens. `runner` may be
 * NULL: then all work is done on the calling thread.
 *
 * Returns 0; KITE_BAD_ARGUMENT, with nothing read or written; or the bad status of an item, whose target then holds
 * anything, while the other items are done. */
KITE_API int64_t kite_pack_pages(const kite_page_layout *layout, const kite_page_item *items, uint64_t num_items,
                                 kite_page_result *results, kite_runner runner, uint32_t threads);
KITE_API int64_t kite_unpack_pages(const kite_page_layout *layout, const kite_page_item *items, uint64_t num_items,
                                   kite_page_result *results, kite_runner runner, uint32_t threads);

/* The checksum that is defined above. */
KITE_API uint64_t kite_checksum(const uint8_t *bytes, uint64_t num_bytes);

#ifdef __cplusplus
}
#endif

#endif
