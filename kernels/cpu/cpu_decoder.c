/* One step of a decoder: all layers in one call, with a pool_run per phase of a layer.
 *
 * The order is that of engine/models/decoder.py. The calling thread alone does what takes less time
 * than waking a thread: norms and rotation of a few tokens.
 */
#include "cpu.h"

#define FEW 16    /* up to so many tokens, the caller does norms and rotations itself */
#define CHUNK 16  /* tokens per task otherwise */

typedef struct {
    const Model *m;
    const Work *w;
    const float *x, *weight;
    float *out;      /* where norms go, or NULL */
    uint32_t *pairs; /* where they go as bf16 pairs, or NULL */
    int layer, tokens;
} Phase;

static int chunk_end(const Phase *p, int task) {
    return (task + 1) * CHUNK < p->tokens ? (task + 1) * CHUNK : p->tokens;
}

static void norm_row(const Model *m, const float *x, const float *weight, float *out, float eps) {
    if (m->centred)
        mean_norm(x, weight, out, m->hidden, eps);
    else
        rms_norm(x, weight, out, m->hidden, eps);
}

static void norm_task(void *arg, int task) {
    const Phase *p = arg;
    const int channels = p->m->hidden;
    float row[channels] ALIGNED;
    for (int token = task * CHUNK; token < chunk_end(p, task); token++) {
        float *out = p->out ? p->out + (size_t)token * channels : row;
        norm_row(p->m, p->x + (size_t)token * channels, p->weight, out, p->m->stream_eps);
        if (p->pairs) to_pairs(out, p->pairs + (size_t)token * (channels / 2), channels);
    }
}

/* Norm rows of `normed` in place and add them to `hidden`. */
static void norm_and_add_task(void *arg, int task) {
    const Phase *p = arg;
    const int channels = p->m->hidden;
    for (int token = task * CHUNK; token < chunk_end(p, task); token++) {
        float *from = p->w->normed + (size_t)token * channels;
        float *to = p->w->hidden + (size_t)token * channels;
        norm_row(p->m, from, p->weight, from, p->m->eps);
        for (int i = 0; i < channels; i++) to[i] += from[i];
    }
}

static void rope_task(void *arg, int task) {
    const Phase *p = arg;
    rope_kv_write(p->m, p->w, p->layer, task * CHUNK, chunk_end(p, task));
}

static void attend_task(void *arg, int task) {
    const Phase *p = arg;
    /* Last bundles first: bundles of a prompt grow, and the longest should not start last. */
    const int bundle = p->w->bundles - 1 - task / p->m->kv_heads;
    attend(p->m, p->w, p->layer, bundle, task % p->m->kv_heads);
}

static void over_tokens(Pool *pool, Task task, Phase *p) {
    const int tasks = (p->tokens + CHUNK - 1) / CHUNK;
    if (p->tokens > FEW)
        pool_run(pool, task, p, tasks);
    else
        for (int i = 0; i < tasks; i++) task(p, i);
}

/* Read column `token` of the head's panels: a word of 64-byte lines, one line for each k; or its
 * codes. */
static void embed_from_head(const Model *m, size_t token, float *to) {
#if HAS_CODES
    if (m->head_packing) {
        const size_t panel = packed_words(m->head_packing, m->kind, m->hidden);
        unpack_column(m->head_packing, m->head + token / PANEL * panel, (int)(token % PANEL),
                      m->hidden, to);
        return;
    }
#endif
    const size_t channels = (size_t)m->hidden, lines = m->kind == WIDE ? channels : channels / 2;
    const uint32_t *from = m->head + token / PANEL * PANEL * lines + token % PANEL;
    if (m->kind == WIDE)
        for (size_t k = 0; k < channels; k++) memcpy(to + k, from + k * PANEL, 4);
    else
        for (size_t k = 0; k < lines; k++) {
            const uint32_t pair = from[k * PANEL];
            to[2 * k] = from_bf16((uint16_t)pair);
            to[2 * k + 1] = from_bf16((uint16_t)(pair >> 16));
        }
}

static void embed(const Model *m, const Work *w) {
    const size_t channels = (size_t)m->hidden;
    for (int token = 0; token < w->tokens; token++) {
        const size_t id = (size_t)w->token_ids[token];
        float *to = w->hidden + (size_t)token * channels;
        if (!m->embeddings)
            embed_from_head(m, id, to);
        else if (m->kind == WIDE)
            memcpy(to, (const float *)m->embeddings + id * channels, channels * 4);
        else
            for (size_t i = 0; i < channels; i++)
                to[i] = from_bf16(((const uint16_t *)m->embeddings)[id * channels + i]);
        if (m->embed_scale != 1.0f)
            for (size_t i = 0; i < channels; i++) to[i] *= m->embed_scale;
    }
}

/* Norm `hidden` by `weight`; return the rows that the block reads: `normed`, or without a norm
 * `hidden` itself. With `pairs` the block reads these, and `normed` is written where the layer's
 * other block reads it alone: all cores have read its lines, so that writing them is slow. */
static const float *norm_hidden(Pool *pool, Phase *p, const float *weight, uint32_t *pairs) {
    if (!weight) return p->w->hidden;
    p->weight = weight;
    p->pairs = pairs;
    p->out = pairs && !p->m->parallel ? NULL : p->w->normed;
    over_tokens(pool, norm_task, p);
    return p->w->normed;
}

/* Add a x b + bias to `hidden`, with a norm of the product where `norm` is its weight. a is in bf16
 * pairs where the model's kind takes them. */
static void add_product(Pool *pool, Phase *p, float *a, const uint32_t *b, int packing,
                        const float *bias, int depth, const float *norm) {
    const Work *w = p->w;
    const int is_paired = takes_pairs(p->m->kind);
    product(pool, &(Product){a, b, norm ? w->normed : w->hidden,
                             is_paired ? (uint32_t *)a : w->pairs, p->tokens, depth, p->m->hidden,
                             p->m->kind, norm ? STORE : ADD, bias, .packing = packing,
                             .has_pairs = is_paired});
    if (!norm) return;
    p->weight = norm;
    over_tokens(pool, norm_and_add_task, p);
}

/* Add what the experts make of x [tokens, hidden] to `hidden`, normed where the layer norms it. */
static void add_experts(Pool *pool, const Phase *p, const Layer *layer, const float *x) {
    const Work *w = p->w;
    const int channels = p->m->hidden;
    for (int first = 0, count; first < p->tokens; first += count) {
        count = p->tokens - first < w->expert_tokens ? p->tokens - first : w->expert_tokens;
        mix_experts(pool, p->m, w, layer->experts, x + (size_t)first * channels, count);
        for (int token = 0; token < count; token++) {
            float *from = w->mixed + (size_t)token * channels;
            float *to = w->hidden + (size_t)(first + token) * channels;
            if (layer->mlp_output_norm)
                norm_row(p->m, from, layer->mlp_output_norm, from, p->m->eps);
            for (int i = 0; i < channels; i++) to[i] += from[i];
        }
    }
}

/* Add what a layer's mixer makes of x [tokens, hidden] to `hidden`. */
static void mix(Pool *pool, Phase *p, const Layer *layer, const float *x) {
    const Model *m = p->m;
    const Work *w = p->w;
    const int tokens = p->tokens, channels = m->hidden;
    const int width = m->heads * m->head_dim, wider = width + 2 * m->kv_heads * m->head_dim;
    const int is_paired = takes_pairs(m->kind) && layer->attention_norm;
    product(pool, &(Product){x, layer->qkv, w->qkv, w->pairs, tokens, channels,
                             layer->recurrence ? m->reader_width : wider, m->kind, STORE,
                             layer->qkv_bias, .packing = layer->qkv_packing,
                             .has_pairs = is_paired});
    if (layer->gate)
        product(pool, &(Product){x, layer->gate, w->gates, w->pairs, tokens, channels, width,
                                 m->kind, STORE, layer->gate_bias,
                                 .packing = layer->gate_packing, .has_pairs = is_paired});
    if (layer->recurrence) {
        mix_recurrent(pool, m, w, layer->recurrence);
    } else {
        over_tokens(pool, rope_task, p);
        pool_run(pool, attend_task, p, w->bundles * m->kv_heads);
    }
    add_product(pool, p, w->attended, layer->output, layer->output_packing,
                layer->output_bias, layer->recurrence ? mixer_width(m) : width,
                layer->attention_output_norm);
}

/* Write hidden states after the last norm, [tokens, hidden], to w->normed, and the tokens' KV. */
void decoder_forward(Pool *pool, const Model *m, const Work *w) {
    const int tokens = w->tokens, channels = m->hidden;
    Phase p = {m, w, w->hidden, NULL, NULL, NULL, 0, tokens};
    /* What a product takes is converted by the task that computes it: a phase of its own would move
     * all of it once more between the cores. */
    uint32_t *const pairs = takes_pairs(m->kind) ? w->pairs : NULL;
    uint32_t *const activated = takes_pairs(m->kind) ? (uint32_t *)w->activated : NULL;
    embed(m, w);
    for (p.layer = 0; p.layer < m->layers; p.layer++) {
        const Layer *layer = m->layer + p.layer;
        const float *x = NULL;
        if (layer->qkv) {
            x = norm_hidden(pool, &p, layer->attention_norm, pairs);
            mix(pool, &p, layer, x);
        }
        if (!layer->down && !layer->experts) continue;
        if (!m->parallel)
            x = norm_hidden(pool, &p, layer->mlp_norm, layer->experts ? NULL : pairs);
        if (layer->experts) {
            add_experts(pool, &p, layer, x);
            continue;
        }
        product(pool, &(Product){x, layer->gate_up, w->activated, w->pairs, tokens, channels,
                                 m->intermediate, m->kind, m->gated, layer->gate_up_bias,
                                 .packing = layer->gate_up_packing,
                                 .has_pairs = pairs && layer->mlp_norm && !m->parallel,
                                 .c_pairs = activated});
        add_product(pool, &p, w->activated, layer->down, layer->down_packing, layer->down_bias,
                    m->intermediate, layer->mlp_output_norm);
    }
    norm_hidden(pool, &p, m->norm, NULL);
}

/* Write logits [rows, vocab] of hidden states rows_in [rows, hidden]. `pairs`: scratch of
 * rows * hidden words. */
void decoder_logits(Pool *pool, const Model *m, const float *rows_in, float *logits, uint32_t *pairs,
                  int rows) {
    product(pool, &(Product){rows_in, m->head, logits, pairs, rows, m->hidden, m->vocab, m->kind,
                             STORE, .packing = m->head_packing});
}
