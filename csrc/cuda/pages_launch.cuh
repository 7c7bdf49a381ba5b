/* Which kernels pack or unpack a batch of items, and how they are launched. */
#ifndef KITE_PAGES_LAUNCH_CUH
#define KITE_PAGES_LAUNCH_CUH

#include "pages_kernels.cuh"

/* A kernel call; csrc/tests/ puts its own in its place. */
#ifndef KITE_LAUNCH
#define KITE_LAUNCH(kernel, blocks_x, blocks_y, stream, ...) \
    kernel<<<dim3(blocks_x, blocks_y), KITE_THREADS, 0, stream>>>(__VA_ARGS__)
#endif

/* Whether the kernels that move 16 bytes at a time may be used with a layout, as far as that alone can tell. */
static int kite_layout_has_vectors(const kite_page_layout *layout) {
    const uint64_t unit = layout->form == KITE_PLANES ? 32 : 16;
    for (uint64_t i = 0; i < layout->num_segments; i++) {
        const kite_page_segment *each = layout->segments + i;
        if ((uintptr_t)each->base % 16 || each->block_stride % 16 || each->token_bytes % unit) return 0;
    }
    return layout->form != KITE_PLANES || layout->item_bytes == 2;
}

static int kite_items_have_vectors(const kite_page_layout *layout, const kite_page_item *items, uint64_t num_items) {
    for (uint64_t i = 0; i < num_items; i++) {
        if ((uintptr_t)items[i].packed % 16) return 0;
        if (layout->form < KITE_INT8) continue;
        const kite_lossy at =
            kite_lossy_place(0, layout->num_segments, layout->segments->token_bytes, items[i].tokens);
        if (at.code_base % 8 || at.channels % 8) return 0;
    }
    return 1;
}

template <typename Stream>
static void kite_launch_copy(const kite_geometry &shape, const kite_batch &batch, uint32_t num_items,
                             kite_page_result *results, int unpack, int vectors, Stream stream) {
    const uint32_t x = shape.num_segments, y = num_items;
    kite_page_result *none = nullptr;
    if (shape.form == KITE_RAW) {
        kite_page_result *summed = vectors ? results : none;
        if (unpack && vectors) KITE_LAUNCH((kite_raw_kernel<1, 1>), x, y, stream, shape, batch, summed);
        else if (unpack) KITE_LAUNCH((kite_raw_kernel<1, 0>), x, y, stream, shape, batch, summed);
        else if (vectors) KITE_LAUNCH((kite_raw_kernel<0, 1>), x, y, stream, shape, batch, summed);
        else KITE_LAUNCH((kite_raw_kernel<0, 0>), x, y, stream, shape, batch, summed);
    } else if (shape.form == KITE_PLANES) {
        if (unpack && vectors) KITE_LAUNCH((kite_planes_kernel<1, 1>), x, y, stream, shape, batch);
        else if (unpack) KITE_LAUNCH((kite_planes_kernel<1, 0>), x, y, stream, shape, batch);
        else if (vectors) KITE_LAUNCH((kite_planes_kernel<0, 1>), x, y, stream, shape, batch);
        else KITE_LAUNCH((kite_planes_kernel<0, 0>), x, y, stream, shape, batch);
    } else {
        if (unpack && vectors) KITE_LAUNCH((kite_restore_kernel<1>), x, y, stream, shape, batch, results);
        else if (unpack) KITE_LAUNCH((kite_restore_kernel<0>), x, y, stream, shape, batch, results);
        else if (vectors) KITE_LAUNCH((kite_quantize_kernel<1>), x, y, stream, shape, batch, results);
        else KITE_LAUNCH((kite_quantize_kernel<0>), x, y, stream, shape, batch, results);
    }
}

/* All kernels of one batch, in order; `results` are zeros. */
template <typename Stream>
static void kite_launch_batch(const kite_geometry &shape, const kite_batch &batch, uint32_t num_items,
                              kite_page_result *results, int unpack, int vectors, Stream stream) {
    kite_launch_copy(shape, batch, num_items, results, unpack, vectors, stream);
    if (!results) return;
    if (shape.form != KITE_RAW || !vectors) {
        const uint64_t words = batch.items[0].packed_bytes / 8 / (4 * KITE_THREADS) + 1;
        KITE_LAUNCH(kite_sum_kernel, (uint32_t)(words < 64 ? words : 64), num_items, stream, batch, results);
    }
    KITE_LAUNCH(kite_sum_end_kernel, 1, 1, stream, batch, num_items, results);
}

#endif
