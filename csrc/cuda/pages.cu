/* The C ABI of kite_cuda.h. */
#include <cuda_runtime.h>

#include <new>
#include <vector>

#include "kite_cuda.h"
#include "pages_launch.cuh"

#ifdef KITE_SOURCES
/* Lets a build see which sources a library was made of. */
extern "C" KITE_API const char kite_cuda_sources[];
const char kite_cuda_sources[] = "kite sources " KITE_SOURCES;
#endif

struct kite_cuda {
    int device;
    cudaStream_t stream;
};

struct kite_cuda_layout {
    std::vector<kite_page_segment> segments; /* on the host, with the pointers of the device */
    kite_page_layout layout;                 /* refers to them */
    kite_geometry shape;                     /* refers to their copy on the device */
    uint64_t token_bytes;
    int device, vectors;
};

namespace {

/* Makes a device the current one of this thread, and at the end the former again. */
class OnDevice {
public:
    explicit OnDevice(int device) {
        status = cudaGetDevice(&former_);
        if (status == cudaSuccess && former_ != device) {
            status = cudaSetDevice(device);
            changed_ = status == cudaSuccess;
        }
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(former_);
    }
    OnDevice(const OnDevice &) = delete;
    OnDevice &operator=(const OnDevice &) = delete;
    cudaError_t status;

private:
    int former_ = 0;
    bool changed_ = false;
};

/* The code of an error, which is then no longer the thread's last one. */
int32_t code(cudaError_t status) {
    if (status != cudaSuccess) (void)cudaGetLastError();
    return static_cast<int32_t>(status);
}

cudaStream_t stream_of(const kite_cuda *context, void *stream) {
    return stream ? static_cast<cudaStream_t>(stream) : context->stream;
}

int32_t move_pages(const kite_cuda *context, const kite_cuda_layout *layout, const kite_page_item *items,
                   uint64_t num_items, kite_page_result *results, void *stream, int unpack) {
    if (!context || !layout || layout->device != context->device || (num_items && !items)) return KITE_BAD_ARGUMENT;
    if (num_items > 1u << 24 || !kite_items_fit(&layout->layout, layout->token_bytes, items, num_items))
        return KITE_BAD_ARGUMENT;
    if (layout->shape.form >= KITE_INT8 && !results) return KITE_BAD_ARGUMENT;
    if (!num_items) return 0;
    OnDevice here(context->device);
    if (here.status != cudaSuccess) return code(here.status);
    const cudaStream_t lane = stream_of(context, stream);
    cudaError_t status = cudaSuccess;
    if (results) status = cudaMemsetAsync(results, 0, num_items * sizeof *results, lane);
    for (uint64_t start = 0; start < num_items && status == cudaSuccess; start += KITE_BATCH) {
        const uint64_t num = num_items - start < KITE_BATCH ? num_items - start : KITE_BATCH;
        kite_batch batch = {};
        memcpy(batch.items, items + start, num * sizeof *items);
        const int vectors = layout->vectors && kite_items_have_vectors(&layout->layout, batch.items, num);
        kite_launch_batch(layout->shape, batch, static_cast<uint32_t>(num), results ? results + start : nullptr,
                          unpack, vectors, lane);
        status = cudaGetLastError();
    }
    return code(status);
}

}  // namespace

uint32_t kite_cuda_abi(void) { return KITE_CUDA_ABI; }

kite_cuda_versions kite_cuda_version(void) {
    kite_cuda_versions found = {0, 0, 0, 0};
    (void)code(cudaDriverGetVersion(&found.driver));
    (void)code(cudaRuntimeGetVersion(&found.runtime));
    found.status = code(cudaGetDeviceCount(&found.num_devices));
    if (found.status) found.num_devices = 0;
    return found;
}

const char *kite_cuda_error(int32_t status) {
    if (status == KITE_BAD_ARGUMENT) return "bad argument";
    return cudaGetErrorString(static_cast<cudaError_t>(status));
}

int32_t kite_cuda_probe(int32_t device, int32_t *capability) {
    int num = 0, major = 0, minor = 0;
    *capability = 0;
    if (const int32_t status = code(cudaGetDeviceCount(&num))) return status;
    if (device < 0 || device >= num) return code(cudaErrorInvalidDevice);
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    *capability = 10 * major + minor;
    if (status != cudaSuccess) return code(status);
    OnDevice here(device);
    if (here.status != cudaSuccess) return code(here.status);
    cudaFuncAttributes attributes;
    return code(cudaFuncGetAttributes(&attributes, kite_sum_kernel));
}

int32_t kite_cuda_create(int32_t device, kite_cuda **context) {
    *context = nullptr;
    int32_t capability = 0;
    if (const int32_t status = kite_cuda_probe(device, &capability)) return status;
    OnDevice here(device);
    if (here.status != cudaSuccess) return code(here.status);
    cudaStream_t stream = nullptr;
    const cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (status != cudaSuccess) return code(status);
    *context = new (std::nothrow) kite_cuda{device, stream};
    if (*context) return 0;
    (void)cudaStreamDestroy(stream);
    return code(cudaErrorMemoryAllocation);
}

void kite_cuda_destroy(kite_cuda *context) {
    if (!context) return;
    {
        OnDevice here(context->device);
        (void)code(cudaStreamSynchronize(context->stream));
        (void)code(cudaStreamDestroy(context->stream));
    }
    delete context;
}

void *kite_cuda_stream(kite_cuda *context) { return context->stream; }

int32_t kite_cuda_wait(kite_cuda *context, void *stream) {
    OnDevice here(context->device);
    return here.status != cudaSuccess ? code(here.status) : code(cudaStreamSynchronize(stream_of(context, stream)));
}

int32_t kite_cuda_layout_create(kite_cuda *context, const kite_page_layout *layout, kite_cuda_layout **made) {
    if (made) *made = nullptr;
    const uint64_t token_bytes = context && layout && made ? kite_token_bytes(layout) : 0;
    if (!token_bytes) return KITE_BAD_ARGUMENT;
    OnDevice here(context->device);
    if (here.status != cudaSuccess) return code(here.status);
    kite_cuda_layout *fresh = nullptr;
    try {
        fresh = new kite_cuda_layout{};
        fresh->segments.assign(layout->segments, layout->segments + layout->num_segments);
    } catch (const std::bad_alloc &) {
        delete fresh;
        return code(cudaErrorMemoryAllocation);
    }
    const uint64_t num_bytes = layout->num_segments * sizeof(kite_page_segment);
    void *copy = nullptr;
    cudaError_t status = cudaMalloc(&copy, num_bytes);
    if (status == cudaSuccess) status = cudaMemcpyAsync(copy, layout->segments, num_bytes, cudaMemcpyDefault, context->stream);
    if (status == cudaSuccess) status = cudaStreamSynchronize(context->stream);
    if (status != cudaSuccess) {
        if (copy) (void)cudaFree(copy);
        delete fresh;
        return code(status);
    }
    fresh->layout = *layout;
    fresh->layout.segments = fresh->segments.data();
    fresh->shape = {static_cast<const kite_page_segment *>(copy), token_bytes,
                    static_cast<uint32_t>(layout->num_segments), layout->item_bytes, layout->kind, layout->form};
    fresh->token_bytes = token_bytes;
    fresh->device = context->device;
    fresh->vectors = kite_layout_has_vectors(&fresh->layout);
    *made = fresh;
    return 0;
}

void kite_cuda_layout_destroy(kite_cuda_layout *layout) {
    if (!layout) return;
    {
        OnDevice here(layout->device);
        (void)code(cudaFree(const_cast<kite_page_segment *>(layout->shape.segments)));
    }
    delete layout;
}

int32_t kite_cuda_pack(kite_cuda *context, const kite_cuda_layout *layout, const kite_page_item *items,
                       uint64_t num_items, kite_page_result *results, void *stream) {
    return move_pages(context, layout, items, num_items, results, stream, 0);
}

int32_t kite_cuda_unpack(kite_cuda *context, const kite_cuda_layout *layout, const kite_page_item *items,
                         uint64_t num_items, kite_page_result *results, void *stream) {
    return move_pages(context, layout, items, num_items, results, stream, 1);
}

int32_t kite_cuda_copy(kite_cuda *context, void *to, const void *from, uint64_t num_bytes, void *stream) {
    OnDevice here(context->device);
    if (here.status != cudaSuccess) return code(here.status);
    return code(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_of(context, stream)));
}

int32_t kite_cuda_event_create(kite_cuda *context, void **event) {
    OnDevice here(context->device);
    if (here.status != cudaSuccess) return code(here.status);
    cudaEvent_t made = nullptr;
    const cudaError_t status = cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync);
    *event = made;
    return code(status);
}

void kite_cuda_event_destroy(void *event) { (void)code(cudaEventDestroy(static_cast<cudaEvent_t>(event))); }

int32_t kite_cuda_event_record(kite_cuda *context, void *event, void *stream) {
    OnDevice here(context->device);
    if (here.status != cudaSuccess) return code(here.status);
    return code(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(context, stream)));
}

int32_t kite_cuda_event_wait(kite_cuda *context, void *event, void *stream) {
    OnDevice here(context->device);
    if (here.status != cudaSuccess) return code(here.status);
    return code(cudaStreamWaitEvent(stream_of(context, stream), static_cast<cudaEvent_t>(event), 0));
}

int32_t kite_cuda_event_query(void *event) {
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (status == cudaSuccess) return 1;
    return status == cudaErrorNotReady ? (code(status), 0) : -code(status);
}

int32_t kite_cuda_event_sync(void *event) { return code(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }
