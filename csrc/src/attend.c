/* Paged attention: arguments, scratch memory, and who does what. */
#include "attend.h"

#include <stdatomic.h>

enum {
    WRITE_ROWS = 64,
    SMALL_ROWS = 4, /* items that wait for memory more than they compute: worth knowing the next one early */
    MAX_LINES = 1 << 20
};

typedef struct {
    const kite_attention *call;
    attend_kernel kernel;
    uint64_t scratch; /* of a thread */
    atomic_int next, seats;
} team;

static uint64_t align(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Sets the scratch pointers of `work` and returns the bytes they need. */
static uint64_t lay_out(const kite_attention *call, uint8_t *scratch, attend_work *work) {
    const uint64_t lines = (uint64_t)call->item_rows * (uint64_t)call->item_heads *
                           (uint64_t)(call->query_heads / call->kv_heads);
    const uint64_t key_dim = (uint64_t)attend_round(call->key_dim), value_dim = (uint64_t)attend_round(call->value_dim);
    float **places[] = {&work->queries, &work->sums, &work->weights, &work->highest,
                        &work->keys, &work->values, &work->scores};
    const uint64_t floats[] = {lines * key_dim, lines * value_dim, lines * 16, lines, key_dim * KEYS, KEYS * value_dim,
                               8 * KEYS};
    uint64_t used = 0;
    for (int i = 0; i < 7; i++) {
        *places[i] = (float *)(void *)(scratch + used);
        used += align(4 * floats[i]);
    }
    work->value_stride = (int32_t)value_dim;
    return used;
}

static int is_valid(const kite_attention *call) {
    if (call->kind != KITE_BFLOAT16 && call->kind != KITE_FLOAT16 && call->kind != KITE_FLOAT32) return 0;
    if (call->key_dim < 1 || call->key_dim > MAX_DIM || call->value_dim < 1 || call->value_dim > MAX_DIM) return 0;
    if (call->kv_heads < 1 || call->query_heads < call->kv_heads || call->query_heads % call->kv_heads) return 0;
    if (call->item_rows < 1 || call->item_rows > MAX_LINES / call->query_heads) return 0;
    if (call->item_heads < 1 || call->kv_heads % call->item_heads) return 0;
    return call->block_tokens >= 1 && call->window >= 0 && call->threads >= 1 && call->rows >= 0 &&
           call->num_items >= 0 && call->num_items <= INT32_MAX / call->kv_heads && call->num_sequences >= 0;
}

static attend_kernel choose(int32_t kernel) {
    const int32_t best = kite_best_kernel();
    if (kernel == KITE_BEST) kernel = best;
    if (kernel < KITE_PLAIN || kernel > best) return NULL;
#ifdef KITE_ATTEND_X86
    if (kernel >= KITE_AVX2 && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return kernel == KITE_AVX512 ? attend_avx512 : attend_avx2;
#endif
    return attend_plain;
}

static void write_heads(uint8_t *to, const uint8_t *from, uint64_t head_bytes, uint64_t stride, int32_t heads) {
    if (stride == head_bytes) {
        memcpy(to, from, head_bytes * (uint64_t)heads);
        return;
    }
    for (int32_t head = 0; head < heads; head++)
        memcpy(to + (uint64_t)head * head_bytes, from + (uint64_t)head * stride, head_bytes);
}

static void write_rows(const kite_attention *call, int32_t first, int32_t last) {
    const int64_t bytes = attend_bytes(call->kind);
    const int64_t key_token = call->key_dim * bytes * call->kv_heads;
    const int64_t value_token = call->value_dim * bytes * call->kv_heads;
    for (int32_t row = first; row < last; row++) {
        const int64_t slot = call->slots[row];
        if (slot < 0) continue;
        const int64_t block = slot / call->block_tokens, offset = slot % call->block_tokens;
        write_heads((uint8_t *)call->key_pages + block * call->key_block * bytes + offset * key_token,
                    (const uint8_t *)call->key + row * call->key_row * bytes, (uint64_t)(call->key_dim * bytes),
                    (uint64_t)(call->key_head * bytes), call->kv_heads);
        write_heads((uint8_t *)call->value_pages + block * call->value_block * bytes + offset * value_token,
                    (const uint8_t *)call->value + row * call->value_row * bytes, (uint64_t)(call->value_dim * bytes),
                    (uint64_t)(call->value_head * bytes), call->kv_heads);
    }
}

static void write_some(void *data) {
    team *all = data;
    const int32_t rows = all->call->rows;
    for (;;) {
        const int32_t first = atomic_fetch_add(&all->next, 1) * WRITE_ROWS;
        if (first >= rows) return;
        write_rows(all->call, first, attend_low(first + WRITE_ROWS, rows));
    }
}

/* Takes the next item; returns 0 if there is none. */
static int take(team *all, attend_work *work) {
    const kite_attention *call = all->call;
    const int32_t number = atomic_fetch_add(&all->next, 1), parts = call->kv_heads / call->item_heads;
    if (number >= call->num_items * parts) return 0;
    const int32_t *item = call->items + 3 * (int64_t)(number / parts), sequence = item[0];
    const int32_t start = call->row_starts[sequence], new_rows = call->row_starts[sequence + 1] - start;
    work->table = call->tables + sequence * call->table_width;
    work->first_row = start + item[1];
    work->position = call->contexts[sequence] - new_rows + item[1];
    work->rows = item[2];
    work->head = number % parts * call->item_heads;
    work->heads = call->item_heads;
    return 1;
}

static void attend_some(void *data) {
    team *all = data;
    const kite_attention *call = all->call;
    const int32_t seat = atomic_fetch_add(&all->seats, 1);
    if (seat >= call->threads) return;
    attend_work work, next;
    lay_out(call, call->scratch + (uint64_t)seat * all->scratch, &work);
    work.call = call;
    work.group = call->query_heads / call->kv_heads;
    const int small = call->item_rows <= SMALL_ROWS;
    int more = take(all, &work);
    while (more) {
        next = work;
        if (small) more = take(all, &next);
        all->kernel(&work, small && more ? &next : NULL);
        if (small)
            work = next;
        else
            more = take(all, &work);
    }
}

static void run(const kite_attention *call, void (*work)(void *), team *all, int32_t pieces) {
    const int32_t threads = attend_low(call->threads, pieces);
    atomic_init(&all->next, 0);
    atomic_init(&all->seats, 0);
    if (threads > 1 && call->run)
        call->run(work, all, (unsigned)call->threads, 0); /* all: another number would rebuild the pool of OpenMP */
    else
        work(all);
}

uint64_t kite_attend_scratch(const kite_attention *call) {
    attend_work work;
    return is_valid(call) ? lay_out(call, NULL, &work) : 0;
}

int64_t kite_attend(const kite_attention *call) {
    team all = {.call = call, .kernel = choose(call->kernel), .scratch = kite_attend_scratch(call)};
    if (!all.kernel || !all.scratch || all.scratch > call->scratch_bytes / (uint64_t)call->threads)
        return KITE_BAD_ARGUMENT;
    run(call, write_some, &all, (call->rows + WRITE_ROWS - 1) / WRITE_ROWS);
    run(call, attend_some, &all, call->num_items * (call->kv_heads / call->item_heads));
    const int32_t used = call->row_starts[call->num_sequences];
    const uint64_t row = (uint64_t)call->query_heads * (uint64_t)call->value_dim * attend_bytes(call->kind);
    if (used < call->rows) memset((uint8_t *)call->out + (uint64_t)used * row, 0, (uint64_t)(call->rows - used) * row);
    return 0;
}
