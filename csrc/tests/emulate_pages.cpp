/* Runs the CUDA kernels on a CPU, one thread of a block per thread of the system, so that tests can compare their bytes
 * where there is no GPU. C++20. */
#include <atomic>
#include <barrier>
#include <cstddef>
#include <thread>
#include <vector>

struct kite_index {
    unsigned x = 0, y = 0;
};

static thread_local kite_index threadIdx, blockIdx, gridDim;
static std::barrier<> *block_barrier;

static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void atomicAdd(unsigned long long *target, unsigned long long value) {
    std::atomic_ref<unsigned long long>(*target).fetch_add(value);
}

#define __device__
#define __global__
#define __shared__ static /* blocks run one after the other */
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define KITE_LAUNCH(kernel, blocks_x, blocks_y, stream, ...) \
    stream.run(blocks_x, blocks_y, [&] { (kernel)(__VA_ARGS__); })

#include "../cuda/pages_kernels.cuh"

struct Emulator {
    template <typename Kernel>
    void run(unsigned blocks_x, unsigned blocks_y, Kernel kernel) const {
        std::barrier<> barrier(KITE_THREADS), between(KITE_THREADS);
        block_barrier = &barrier;
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < KITE_THREADS; i++)
            threads.emplace_back([=, &kernel, &between] {
                threadIdx.x = i;
                gridDim = {blocks_x, blocks_y};
                for (unsigned block = 0; block < blocks_x * blocks_y; block++) {
                    blockIdx = {block % blocks_x, block / blocks_x};
                    kernel();
                    between.arrive_and_wait();
                }
            });
        for (std::thread &thread : threads) thread.join();
    }
};

#include "../cuda/pages_launch.cuh"

/* What kite_cuda_pack and kite_cuda_unpack do, with host memory. `vectors` is 1 to allow the kernels that move 16 bytes
 * at a time; returns whether they were used, or KITE_BAD_ARGUMENT. */
extern "C" KITE_API int32_t kite_emulate(const kite_page_layout *layout, const kite_page_item *items,
                                         uint64_t num_items, kite_page_result *results, int32_t unpack,
                                         int32_t vectors) {
    const uint64_t token_bytes = kite_token_bytes(layout);
    if (!token_bytes || num_items > KITE_BATCH || !kite_items_fit(layout, token_bytes, items, num_items))
        return KITE_BAD_ARGUMENT;
    kite_batch batch = {};
    memcpy(batch.items, items, num_items * sizeof *items);
    memset(results, 0, num_items * sizeof *results);
    const kite_geometry shape = {layout->segments,   token_bytes,  (uint32_t)layout->num_segments,
                                 layout->item_bytes, layout->kind, layout->form};
    const int used = vectors && kite_layout_has_vectors(layout) && kite_items_have_vectors(layout, items, num_items);
    kite_launch_batch(shape, batch, (uint32_t)num_items, results, unpack, used, Emulator());
    return used;
}
