/* The part of the pages library that runs on NVIDIA GPUs. Forms, layouts and checksums are those of kite_pages.h; all
 * pointers inside of layouts and items are device pointers.
 *
 * Functions return 0, KITE_BAD_ARGUMENT or a positive CUDA error code, for which kite_cuda_error has words. A `stream` is
 * a cudaStream_t of the context's device; NULL stands for the context's own stream, which waits for no other.
 */
#ifndef KITE_CUDA_H
#define KITE_CUDA_H

#include "../include/kite_pages.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KITE_CUDA_ABI 1

typedef struct kite_cuda kite_cuda;               /* a device with a stream of its own */
typedef struct kite_cuda_layout kite_cuda_layout; /* a layout whose segments are on the device */

typedef struct {
    int32_t driver, runtime; /* versions of CUDA, as 13000 for 13.0; driver is 0 where there is none */
    int32_t num_devices;
    int32_t status; /* what asking for the devices gave: 0 or a CUDA error code */
} kite_cuda_versions;

KITE_API uint32_t kite_cuda_abi(void);
KITE_API kite_cuda_versions kite_cuda_version(void);
KITE_API const char *kite_cuda_error(int32_t status);

/* Compute capability of a device, as 90 for 9.0, and whether the library has code for it: it loads a kernel to see. */
KITE_API int32_t kite_cuda_probe(int32_t device, int32_t *capability);

KITE_API int32_t kite_cuda_create(int32_t device, kite_cuda **context);
/* Waits for the context's stream. Layouts and events are destroyed before. */
KITE_API void kite_cuda_destroy(kite_cuda *context);
KITE_API void *kite_cuda_stream(kite_cuda *context);
KITE_API int32_t kite_cuda_wait(kite_cuda *context, void *stream); /* until the stream's work is done */

/* Copies the segments to the device; `layout` is not needed afterwards. */
KITE_API int32_t kite_cuda_layout_create(kite_cuda *context, const kite_page_layout *layout, kite_cuda_layout **made);
KITE_API void kite_cuda_layout_destroy(kite_cuda_layout *layout);

/* Enqueue the work and come back. `items` is host memory and not needed afterwards; `results`, NULL or one per item, is
 * device memory that is complete when the stream gets there. In the lossy forms `results` is needed: it has the
 * statuses. */
KITE_API int32_t kite_cuda_pack(kite_cuda *context, const kite_cuda_layout *layout, const kite_page_item *items,
                                uint64_t num_items, kite_page_result *results, void *stream);
KITE_API int32_t kite_cuda_unpack(kite_cuda *context, const kite_cuda_layout *layout, const kite_page_item *items,
                                  uint64_t num_items, kite_page_result *results, void *stream);

/* Copies between host (best pinned) and device memory, enqueued. */
KITE_API int32_t kite_cuda_copy(kite_cuda *context, void *to, const void *from, uint64_t num_bytes, void *stream);

/* Events: record marks a point of a stream; wait lets a stream wait for it; query is 1 if it passed, 0 if not yet,
 * negative for an error code; sync waits on the calling thread without spinning. */
KITE_API int32_t kite_cuda_event_create(kite_cuda *context, void **event);
KITE_API void kite_cuda_event_destroy(void *event);
KITE_API int32_t kite_cuda_event_record(kite_cuda *context, void *event, void *stream);
KITE_API int32_t kite_cuda_event_wait(kite_cuda *context, void *event, void *stream);
KITE_API int32_t kite_cuda_event_query(void *event);
KITE_API int32_t kite_cuda_event_sync(void *event);

#ifdef __cplusplus
}
#endif

#endif
