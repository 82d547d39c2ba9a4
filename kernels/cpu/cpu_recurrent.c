/* Mixers with a recurrent state: short convolutions, the gated delta rule, Mamba-2.
 *
 * They stand between a layer's two linear maps, in place of attention. The rules are those of
 * kernels/reference_convolution.py, reference_delta.py and reference_mamba2.py, token by token: a
 * rule costs a fraction of a layer's products, its part of a state stays in the L1 cache from the
 * first token of a row to the last, and no cut of a prompt changes a bit. Heads are independent of
 * each other, and so are the columns of a state of the delta rule and the rows of one of Mamba-2.
 *
 * A row of w->qkv, as the layer's first map gives it (C channels of the convolution, H heads):
 *     CONVOLUTION  [gate before, C] [gate behind, C] [input, C]
 *     DELTA        [queries, keys, values: C] [gate, H * V] [beta, H] [decay, H]
 *     MAMBA        [gate, H * P] [x, written, read: C] [step, H]
 * w->convolved has the convolution's outputs, then what the heads read in place of values or x. With
 * CONVOLUTION they go to w->attended at once.
 */
#include "cpu.h"

#include <math.h>

#define FEW 4      /* up to so many tokens, or rows, the caller works alone */
#define CHUNK 4    /* tokens of a task */
#define UNIT_EPS 1e-6f
#define VECTORS (LANES == 16 ? 2 : 4) /* of a state's row that the delta rule takes at once */
#define MAMBA_ROWS 16 /* of a state, taken together: 8 KiB of 128 columns */

typedef struct {
    const Model *m;
    const Work *w;
    const Recurrence *r;
} Mix;

static float *reader_row(const Mix *s, int token) {
    return s->w->qkv + (size_t)token * s->m->reader_width;
}

static float *mixed_row(const Mix *s, int token) {
    return s->w->convolved + (size_t)token * s->m->conv_channels;
}

static void *state_of(const Mix *s, int row, int64_t at) {
    return s->w->states + s->w->row_slot[row] * s->w->state_bytes + at;
}

/* Return the channels of all heads: of values, or of x. */
static int inner_of(const Model *m) {
    return m->rule_heads * (m->rule == DELTA ? m->rule_columns : m->rule_rows);
}

/* Return where the values or x of a token begin in its row of w->convolved. */
static int inner_at(const Model *m) {
    return m->rule == DELTA ? m->conv_channels - inner_of(m) : 0;
}

static int inputs_at(const Model *m) { return m->rule == MAMBA ? inner_of(m) : 0; }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE vf silu(vf x) { return x / (1.0f + exp_of(-x)); }

/* Return channels c.. of an input of the convolution. */
INLINE vf input(const Mix *s, const float *reader, int is_gated, int c) {
    return is_gated ? load(reader + c) * load(reader + 2 * s->m->conv_channels + c)
                    : load(reader + inputs_at(s->m) + c);
}

static void write_row(const Model *m, const Work *w, const float *from, int token, int width) {
    const size_t at = (size_t)token * width;
    if (takes_pairs(m->kind))
        to_pairs(from, (uint32_t *)w->attended + at / 2, width);
    else
        memcpy(w->attended + at, from, (size_t)width * 4);
}

INLINE void convolve_token(const Mix *s, int token, int row, const int is_gated) {
    const Model *m = s->m;
    const int kept = m->conv_width - 1, channels = m->conv_channels;
    const int at = token - s->w->row_first[row]; /* of its row */
    const float *state = state_of(s, row, s->r->inputs_at), *reader = reader_row(s, token);
    float gated[is_gated ? channels : 1] ALIGNED, *out = is_gated ? gated : mixed_row(s, token);
    for (int c = 0; c < channels; c += LANES) {
        vf total = {0};
        for (int tap = 0; tap <= kept; tap++) {
            const int back = kept - tap;
            const vf x = back <= at ? input(s, reader_row(s, token - back), is_gated, c)
                                    : load(state + (size_t)(tap + at) * channels + c);
            total += x * load(s->r->taps + (size_t)tap * channels + c);
        }
        if (s->r->taps_bias) total += load(s->r->taps_bias + c);
        store(out + c, is_gated ? load(reader + channels + c) * total : silu(total));
    }
    if (is_gated) write_row(m, s->w, gated, token, channels);
}

/* Give a head's key or query [dim] a length of `length`. */
static void to_length(float *x, int dim, float length) {
    vf total = {0};
    for (int i = 0; i < dim; i += LANES) total += load(x + i) * load(x + i);
    const float scale = length / sqrtf(sum_of(total) + UNIT_EPS);
    for (int i = 0; i < dim; i += LANES) store(x + i, load(x + i) * scale);
}

/* Turn what a token has for each head into what the rule takes. */
static void prepare_token(const Mix *s, int token) {
    const Model *m = s->m;
    const int heads = m->rule_heads;
    float *tail = reader_row(s, token) + m->reader_width - heads;
    if (m->rule == MAMBA) {
        for (int h = 0; h < heads; h++) tail[h] = softplus(tail[h] + s->r->dt_bias[h]);
        return;
    }
    const int dim = m->rule_rows, keys = m->rule_groups * dim;
    float *mixed = mixed_row(s, token);
    for (int at = 0; at < keys; at += dim) {
        to_length(mixed + at, dim, 1.0f / sqrtf((float)dim));
        to_length(mixed + keys + at, dim, 1.0f);
    }
    for (int h = 0; h < heads; h++) {
        tail[h] = expf(-s->r->rate[h] * softplus(tail[h] + s->r->dt_bias[h]));
        tail[h - heads] = 1.0f / (1.0f + expf(-tail[h - heads]));
    }
}

static void convolve_task(void *arg, int task) {
    const Mix *s = arg;
    const Work *w = s->w;
    int row = 0;
    for (int token = task * CHUNK; token < (task + 1) * CHUNK && token < w->tokens; token++) {
        while (w->row_first[row + 1] <= token) row++;
        if (s->m->rule == CONVOLUTION) {
            convolve_token(s, token, row, 1);
        } else {
            convolve_token(s, token, row, 0);
            prepare_token(s, token);
        }
    }
}

/* Keep a row's last inputs before its drafts, when no token needs those before it. */
static void keep_task(void *arg, int row) {
    const Mix *s = arg;
    const int kept = s->m->conv_width - 1, channels = s->m->conv_channels;
    const int first = s->w->row_first[row], count = s->w->row_drafts[row] - first;
    float *state = state_of(s, row, s->r->inputs_at);
    for (int i = 0; i < kept; i++) {
        const int token = first + count - kept + i;
        float *to = state + (size_t)i * channels;
        if (token < first) {
            memcpy(to, state + (size_t)(count + i) * channels, (size_t)channels * 4);
            continue;
        }
        const float *reader = reader_row(s, token);
        for (int c = 0; c < channels; c += LANES)
            store(to + c, input(s, reader, s->m->rule == CONVOLUTION, c));
    }
}

/* Decay a state's columns [rows][vecs * LANES], replace beta of what they have at k by v, and read
 * them at q, into v. */
INLINE void delta_token(float *state, size_t stride, const int vecs, const float *q, const float *k,
                        float *v, float decay, float beta, int rows) {
    vf sums[2 * VECTORS], change[VECTORS];
    clear(sums, 2 * vecs);
    for (int i = 0; i < rows; i += 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int x = 0; x < vecs; x++)
                sums[half * vecs + x] += load(state + (i + half) * stride + x * LANES) * k[i + half];
#pragma GCC unroll 4
    for (int x = 0; x < vecs; x++)
        change[x] = (load(v + x * LANES) - (sums[x] + sums[vecs + x]) * decay) * beta;
    clear(sums, 2 * vecs);
    for (int i = 0; i < rows; i += 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int x = 0; x < vecs; x++) {
                float *at = state + (i + half) * stride + x * LANES;
                const vf after = load(at) * decay + change[x] * k[i + half];
                store(at, after);
                sums[half * vecs + x] += after * q[i + half];
            }
#pragma GCC unroll 4
    for (int x = 0; x < vecs; x++) store(v + x * LANES, sums[x] + sums[vecs + x]);
}

/* Run a row's tokens through `vecs` vectors of columns of a head's state; drafts through a copy. */
INLINE void delta_columns(const Mix *s, int row, int head, int column, const int vecs) {
    const Model *m = s->m;
    const int dim = m->rule_rows, columns = m->rule_columns, keys = m->rule_groups * dim;
    const int key = head / (m->rule_heads / m->rule_groups) * dim;
    float *state = (float *)state_of(s, row, s->r->matrices_at) + (size_t)head * dim * columns;
    state += column;
    size_t stride = columns;
    const int end = s->w->row_first[row + 1], drafts = s->w->row_drafts[row];
    float spare[drafts < end ? dim * vecs * LANES : 1] ALIGNED;
    for (int token = s->w->row_first[row]; token < end; token++) {
        if (token == drafts) {
            for (int i = 0; i < dim; i++)
                memcpy(spare + i * vecs * LANES, state + i * stride, (size_t)vecs * LANES * 4);
            state = spare;
            stride = vecs * LANES;
        }
        float *mixed = mixed_row(s, token);
        const float *decay = reader_row(s, token) + m->reader_width - m->rule_heads + head;
        delta_token(state, stride, vecs, mixed + key, mixed + keys + key,
                    mixed + 2 * keys + head * columns + column, *decay,
                    *(decay - m->rule_heads), dim);
    }
}

static void delta_task(void *arg, int task) {
    const Mix *s = arg;
    const int row = task / s->m->rule_heads, head = task % s->m->rule_heads;
    const int columns = s->m->rule_columns;
    int column = 0;
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES)
        delta_columns(s, row, head, column, VECTORS);
    for (; column < columns; column += LANES) delta_columns(s, row, head, column, 1);
}

/* Run a row's tokens through `MAMBA_ROWS` rows of a head's state at a time; drafts through a copy. */
static void mamba_task(void *arg, int task) {
    const Mix *s = arg;
    const Model *m = s->m;
    const int row = task / m->rule_heads, head = task % m->rule_heads;
    const int rows = m->rule_rows, columns = m->rule_columns;
    const int written = inner_of(m) + head / (m->rule_heads / m->rule_groups) * columns;
    float *whole = (float *)state_of(s, row, s->r->matrices_at) + (size_t)head * rows * columns;
    const int end = s->w->row_first[row + 1], drafts = s->w->row_drafts[row];
    float spare[drafts < end ? MAMBA_ROWS * columns : 1] ALIGNED;
    for (int part = 0; part < rows; part += MAMBA_ROWS) {
        const int part_end = part + MAMBA_ROWS < rows ? part + MAMBA_ROWS : rows;
        float *state = whole + (size_t)part * columns;
        for (int token = s->w->row_first[row]; token < end; token++) {
            if (token == drafts)
                state = memcpy(spare, state, (size_t)(part_end - part) * columns * 4);
            const float step = reader_row(s, token)[m->reader_width - m->rule_heads + head];
            const float decay = expf(-s->r->rate[head] * step);
            float *x = mixed_row(s, token);
            const float *b = x + written, *c = b + m->rule_groups * columns;
            x += head * rows;
            for (int p = part; p < part_end; p++) {
                float *at = state + (size_t)(p - part) * columns;
                const float in = x[p] * step;
                vf sum = {0};
                for (int i = 0; i < columns; i += LANES) {
                    const vf after = load(at + i) * decay + load(b + i) * in;
                    store(at + i, after);
                    sum += after * load(c + i);
                }
                x[p] = sum_of(sum) + x[p] * s->r->through[head];
            }
        }
    }
}

/* Norm and gate what the heads have read, as kernels.reference.gated_norm says. */
static void gated_norm_task(void *arg, int task) {
    const Mix *s = arg;
    const Model *m = s->m;
    const int inner = inner_of(m), is_delta = m->rule == DELTA;
    const int width = is_delta ? m->rule_columns : inner / m->rule_groups; /* normed together */
    float out[inner] ALIGNED;
    for (int token = task * CHUNK; token < (task + 1) * CHUNK && token < s->w->tokens; token++) {
        const float *read = mixed_row(s, token) + inner_at(m);
        const float *gate = reader_row(s, token) + (is_delta ? m->conv_channels : 0);
        for (int at = 0; at < inner; at += width) {
            vf squares = {0};
            for (int i = at; i < at + width; i += LANES) {
                vf x = load(read + i);
                if (!is_delta) x *= silu(load(gate + i));
                squares += x * x;
                store(out + i, x);
            }
            const float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + m->eps);
            for (int i = at; i < at + width; i += LANES) {
                const vf x = load(out + i) * scale * load(s->r->norm + (is_delta ? i - at : i));
                store(out + i, is_delta ? x * silu(load(gate + i)) : x);
            }
        }
        write_row(m, s->w, out, token, inner);
    }
}

int mixer_width(const Model *m) {
    return m->rule == CONVOLUTION ? m->conv_channels : inner_of(m);
}

static void run(Pool *pool, Task task, Mix *s, int count, int is_small) {
    if (is_small)
        for (int i = 0; i < count; i++) task(s, i);
    else
        pool_run(pool, task, s, count);
}

void mix_recurrent(Pool *pool, const Model *m, const Work *w, const Recurrence *r) {
    Mix s = {m, w, r};
    const int chunks = (w->tokens + CHUNK - 1) / CHUNK;
    run(pool, convolve_task, &s, chunks, w->tokens <= FEW);
    run(pool, keep_task, &s, w->rows, w->rows <= FEW);
    if (m->rule == CONVOLUTION) return;
    pool_run(pool, m->rule == DELTA ? delta_task : mamba_task, &s, w->rows * m->rule_heads);
    run(pool, gated_norm_task, &s, chunks, w->tokens <= FEW);
}
