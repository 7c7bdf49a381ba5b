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

#ifdef __cplusplus
}
#endif

#endif
