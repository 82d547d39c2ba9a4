/* A mixture of experts: a router sends each token to a few gated MLPs, whose outputs are summed.
 *
 * The rows of an expert are gathered, so that its weights are read once for all of them, and the
 * products of all experts are one phase of the pool. A token's sum goes over its experts in
 * ascending order, and each row of a product has the same bits in any batch, so a token's result
 * does not depend on the others. The order of operations is that of engine/models/moe.py.
 */
#include "cpu.h"

#include <math.h>

#define CHUNK 16  /* rows or tokens of a task */

typedef struct {
    const Model *m;
    const Work *w;
    const Experts *e;
    const float *x;   /* [tokens, hidden]: what the experts read */
    int tokens, rows; /* of this piece of the step; rows: tokens * top_k */
} Step;

static int chunk_end(int task, int count) {
    return (task + 1) * CHUNK < count ? (task + 1) * CHUNK : count;
}

static void in_chunks(Pool *pool, Task task, Step *s, int count) {
    pool_run(pool, task, s, (count + CHUNK - 1) / CHUNK);
}

/* Write the indices of the `count` best of scores [n], the first of equals first. Scores that are
 * not numbers lose to all others; `scores` of chosen ones become minus infinity. */
static void take_best(float *scores, int n, int count, int32_t *best) {
    char taken[n];
    memset(taken, 0, (size_t)n);
    for (int i = 0; i < count; i++) {
        int top = -1;
        for (int j = 0; j < n; j++)
            if (!taken[j] && (top < 0 || scores[j] > scores[top] || scores[top] != scores[top]))
                top = j;
        taken[top] = 1;
        best[i] = top;
    }
}

/* Set the scores outside the best groups to minus infinity. */
static void keep_best_groups(const Model *m, const Experts *e, float *choice) {
    const int size = m->experts / m->expert_groups;
    float best[m->expert_groups];
    int32_t kept[m->expert_groups];
    for (int g = 0; g < m->expert_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < size; i++) {
            const float score = choice[g * size + i];
            if (score > first) {
                second = first;
                first = score;
            } else if (score > second) {
                second = score;
            }
        }
        best[g] = e->choice_bias ? first + second : first;
    }
    take_best(best, m->expert_groups, m->expert_groups_kept, kept);
    for (int g = 0; g < m->expert_groups; g++) {
        int is_kept = 0;
        for (int i = 0; i < m->expert_groups_kept; i++) is_kept |= kept[i] == g;
        for (int i = 0; i < size && !is_kept; i++) choice[g * size + i] = -INFINITY;
    }
}

/* Turn a token's router logits into scores. */
static void score(const Model *m, float *logits) {
    const int n = m->experts;
    if (m->expert_score == CHOSEN_SOFTMAX) return;
    if (m->expert_score == SIGMOID) {
        for (int i = 0; i < n; i++) logits[i] = 1.0f / (1.0f + expf(-logits[i]));
        return;
    }
    float top = logits[0], total = 0;
    for (int i = 1; i < n; i++) top = logits[i] > top ? logits[i] : top;
    for (int i = 0; i < n; i++) total += logits[i] = expf(logits[i] - top);
    for (int i = 0; i < n; i++) logits[i] /= total;
}

/* Write a token's experts in ascending order, and their weights. `logits` [experts] is scratch. */
static void choose(const Model *m, const Experts *e, float *logits, int32_t *chosen, float *weight) {
    const int n = m->experts, k = m->top_k;
    float choice[n];
    score(m, logits);
    for (int i = 0; i < n; i++) choice[i] = logits[i] + (e->choice_bias ? e->choice_bias[i] : 0.0f);
    if (m->expert_groups > 1) keep_best_groups(m, e, choice);
    take_best(choice, n, k, chosen);
    float total = 0;
    const float top = logits[chosen[0]];
    for (int i = 0; i < k; i++) {
        weight[i] = logits[chosen[i]];
        if (m->expert_score == CHOSEN_SOFTMAX) weight[i] = expf(weight[i] - top);
        total += weight[i];
    }
    const int divides = m->renormalise || m->expert_score == CHOSEN_SOFTMAX;
    const float factor = m->expert_scale / (divides ? total + 1e-20f : 1.0f);
    for (int i = 0; i < k; i++) weight[i] *= factor;
    for (int i = 1; i < k; i++)
        for (int j = i; j && chosen[j - 1] > chosen[j]; j--) {
            const int32_t expert = chosen[j];
            const float own = weight[j];
            chosen[j] = chosen[j - 1];
            weight[j] = weight[j - 1];
            chosen[j - 1] = expert;
            weight[j - 1] = own;
        }
}

static void choose_task(void *arg, int task) {
    const Step *s = arg;
    const int k = s->m->top_k;
    for (int token = task * CHUNK; token < chunk_end(task, s->tokens); token++)
        choose(s->m, s->e, s->w->expert_logits + (size_t)token * s->m->experts,
               s->w->expert_of + token * k, s->w->expert_weight + token * k);
}

/* Give each token and expert a row, the rows of an expert side by side. Writes the first row of each
 * expert, and behind the last the number of rows. */
static void place_rows(const Step *s, int *first) {
    const Work *w = s->w;
    const int n = s->m->experts, k = s->m->top_k;
    int next[n];
    memset(first, 0, sizeof(int) * (size_t)(n + 1));
    for (int i = 0; i < s->rows; i++) first[w->expert_of[i] + 1]++;
    for (int i = 0; i < n; i++) first[i + 1] += first[i];
    memcpy(next, first, sizeof next);
    for (int i = 0; i < s->rows; i++) {
        const int row = next[w->expert_of[i]]++;
        w->expert_row[i] = row;
        w->expert_token[row] = i / k;
    }
}

/* Copy what the rows' tokens have to the rows, as the products read it. */
static void gather_task(void *arg, int task) {
    const Step *s = arg;
    const int channels = s->m->hidden;
    for (int row = task * CHUNK; row < chunk_end(task, s->rows); row++) {
        const float *from = s->x + (size_t)s->w->expert_token[row] * channels;
        const int kind = s->m->kind, packing = s->e->gate_up_packing;
        uint32_t *to = takes_left(kind, packing) ? s->w->expert_pairs : (uint32_t *)s->w->expert_rows;
        to_left(kind, packing, from, to + row * left_words(kind, packing, channels), 1, channels);
    }
}

static void activated_to_pairs_task(void *arg, int task) {
    const Step *s = arg;
    const int width = s->m->expert_width, row = task * CHUNK;
    const int kind = s->m->kind, packing = s->e->down_packing;
    to_left(kind, packing, s->w->expert_activated + (size_t)row * width,
            s->w->expert_pairs + row * left_words(kind, packing, width),
            chunk_end(task, s->rows) - row, width);
}

/* Sum a token's rows, and add what all tokens take. */
static void combine_task(void *arg, int task) {
    const Step *s = arg;
    const Work *w = s->w;
    const int k = s->m->top_k, channels = s->m->hidden;
    for (int token = task * CHUNK; token < chunk_end(task, s->tokens); token++) {
        float *to = w->mixed + (size_t)token * channels;
        memset(to, 0, (size_t)channels * 4);
        for (int i = token * k; i < (token + 1) * k; i++) {
            const float *from = w->expert_rows + (size_t)w->expert_row[i] * channels;
            const float weight = w->expert_weight[i];
            for (int c = 0; c < channels; c += LANES)
                store(to + c, load(to + c) + load(from + c) * weight);
        }
        if (!s->e->shared_gate_up) continue;
        const float *shared = w->shared + (size_t)token * channels;
        float gate = 1.0f;
        if (s->e->shared_gate) {
            vf total = {0};
            const float *x = s->x + (size_t)token * channels;
            for (int c = 0; c < channels; c += LANES)
                total += load(x + c) * load(s->e->shared_gate + c);
            gate = 1.0f / (1.0f + expf(-sum_of(total)));
        }
        for (int c = 0; c < channels; c += LANES)
            store(to + c, load(to + c) + load(shared + c) * gate);
    }
}

/* Multiply the rows of each expert by its matrix. `all`: the product of all rows, as if there were
 * one matrix, which has `padded` columns in its panels; the matrices and biases of the others are
 * behind it. */
static void by_expert(Pool *pool, const Step *s, const int *first, Product all, int padded) {
    const size_t depth = (size_t)all.depth;
    const size_t words = (size_t)(padded / PANEL) * packed_words(all.packing, all.kind, all.depth);
    Product products[s->m->experts];
    int count = 0;
    for (int e = 0; e < s->m->experts; e++) {
        const size_t row = (size_t)first[e];
        if (first[e] == first[e + 1]) continue;
        Product *p = products + count++;
        *p = all;
        p->rows = first[e + 1] - first[e];
        p->a += row * depth;
        p->b += (size_t)e * words;
        p->c += row * (size_t)all.columns;
        p->pairs += row * left_words(all.kind, all.packing, all.depth);
        if (all.bias) p->bias += (size_t)e * (size_t)padded;
    }
    grouped_products(pool, products, count);
}

static void share(Pool *pool, const Step *s) {
    const Model *m = s->m;
    const Work *w = s->w;
    product(pool, &(Product){s->x, s->e->shared_gate_up, w->shared_activated, w->pairs, s->tokens,
                             m->hidden, m->shared_width, m->kind, m->gated});
    product(pool, &(Product){w->shared_activated, s->e->shared_down, w->shared, w->pairs, s->tokens,
                             m->shared_width, m->hidden, m->kind, STORE});
}

static int padded(int columns) { return (columns + 2 * PANEL - 1) / (2 * PANEL) * (2 * PANEL); }

void mix_experts(Pool *pool, const Model *m, const Work *w, const Experts *e, const float *x,
                 int tokens) {
    Step s = {m, w, e, x, tokens, tokens * m->top_k};
    const int wide = padded(2 * m->expert_width), narrow = padded(m->hidden);
    int first[m->experts + 1];
    product(pool, &(Product){x, e->router, w->expert_logits, NULL, tokens, m->hidden, m->experts,
                             WIDE, STORE, e->router_bias});
    in_chunks(pool, choose_task, &s, tokens);
    place_rows(&s, first);
    in_chunks(pool, gather_task, &s, s.rows);
    by_expert(pool, &s, first,
              (Product){w->expert_rows, e->gate_up, w->expert_activated, w->expert_pairs, s.rows,
                        m->hidden, m->expert_width, m->kind, m->expert_gated, e->gate_up_bias,
                        e->gate_up_packing},
              wide);
    if (takes_left(m->kind, e->down_packing)) in_chunks(pool, activated_to_pairs_task, &s, s.rows);
    by_expert(pool, &s, first,
              (Product){w->expert_activated, e->down, w->expert_rows, w->expert_pairs, s.rows,
                        m->expert_width, m->hidden, m->kind, STORE, e->down_bias, e->down_packing},
              narrow);
    if (e->shared_gate_up) share(pool, &s);
    in_chunks(pool, combine_task, &s, tokens);
}
