/* Attention over paged KV, one bundle of query tokens and one KV head per task.
 *
 * The query heads of a KV head and the tokens of a bundle are rows of one small matrix, so keys of
 * blocks that many rows share are read once for all of them. Each row keeps a running maximum, sum
 * and output (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) through
 * shared tiles and its own tiles, so no parts have to be merged.
 *
 * A block of one KV head, D channels, S = 16 slots:
 *     K  WIDE [D][S] fp32       PAIRS [D / 2][S] words of two channels
 *     V  WIDE [S][D] fp32       PAIRS [S / 2][D] words of two slots
 * `multiply` reads both as right-hand sides without a copy. BYTES: see cpu_kv_int8.c.
 */
#include "cpu.h"

#include <math.h>

#define WIDTH (2 * LANES)

/* Return the words of one block's K or V of one KV head. */
static size_t head_words(const Model *m) {
    if (m->kv_kind == BYTES) return (size_t)BLOCK * (m->head_dim + 2) / 4;
    return (size_t)BLOCK * m->head_dim / (m->kv_kind == WIDE ? 1 : 2);
}

static uint32_t *keys_of(const Model *m, int64_t block, int layer, int kv_head) {
    size_t head = head_words(m);
    const size_t row = (size_t)block * m->kv_rows + m->layer[layer].kv_row;
    return m->kv + (row * 2 * m->kv_heads + kv_head) * head;
}

static uint32_t *values_of(const Model *m, int64_t block, int layer, int kv_head) {
    return keys_of(m, block, layer, kv_head) + m->kv_heads * head_words(m);
}

static void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

/* Norm a token's queries and keys. */
static void norm_queries_and_keys(const Model *m, const Layer *l, float *qkv) {
    const int queries = m->heads * m->head_dim, keys = m->kv_heads * m->head_dim;
    for (int at = 0; at < queries; at += m->q_norm_width)
        rms_norm(qkv + at, l->q_norm, qkv + at, m->q_norm_width, m->eps);
    for (int at = queries; at < queries + keys; at += m->k_norm_width)
        rms_norm(qkv + at, l->k_norm, qkv + at, m->k_norm_width, m->eps);
}

void rope_kv_write(const Model *m, const Work *w, int layer, int first, int end) {
    const int dim = m->head_dim, width = (m->heads + 2 * m->kv_heads) * dim;
    const Layer *l = m->layer + layer;
    const int64_t *slots = w->place[l->group].slots;
    for (int token = first; token < end; token++) {
        float *qkv = w->qkv + (size_t)token * width;
        const size_t at = (size_t)w->positions[token] * (dim / 2);
        if (l->q_norm) norm_queries_and_keys(m, l, qkv);
        for (int head = 0; head < m->heads + m->kv_heads; head++)
            rotate(qkv + head * dim, l->cos + at, l->sin + at, dim / 2);
        if (slots[token] < 0) continue; /* its KV is cached */
        const int64_t block = slots[token] / BLOCK;
        const int slot = (int)(slots[token] % BLOCK);
        for (int head = 0; head < m->kv_heads; head++) {
            const float *k = qkv + (m->heads + head) * dim, *v = k + m->kv_heads * dim;
            uint32_t *keys = keys_of(m, block, layer, head);
            uint32_t *values = values_of(m, block, layer, head);
            if (m->kv_kind == BYTES) {
                int8_write(k, dim, 0, slot, (uint8_t *)keys);
                int8_write(v, dim, 1, slot, (uint8_t *)values);
                continue;
            }
            if (m->kv_kind == WIDE) {
                for (int d = 0; d < dim; d++) ((float *)keys)[d * BLOCK + slot] = k[d];
                memcpy((float *)values + slot * dim, v, (size_t)dim * 4);
                continue;
            }
            for (int d = 0; d < dim; d += 2)
                keys[d / 2 * BLOCK + slot] =
                    (uint32_t)to_bf16(k[d]) | (uint32_t)to_bf16(k[d + 1]) << 16;
            uint16_t *halves = (uint16_t *)(values + slot / 2 * dim) + slot % 2;
            for (int d = 0; d < dim; d++) halves[2 * d] = to_bf16(v[d]);
        }
    }
}

/* Arguments of one tile: `rows` query rows against up to four blocks. */
typedef struct {
    const float *q;           /* [rows][lda] */
    const float *p;           /* [rows][ldp]: probabilities, in `scores` or as bf16 pairs */
    float *scores, *out;      /* [rows][TILE], [rows][dim] */
    const uint32_t *k[TILE / BLOCK + 1], *v[TILE / BLOCK + 1];
    int blocks, dim, rows;
    size_t lda, ldp;
    const int8_t *limbs;    /* BYTES: of the queries, [rows][2][dim] */
    const Int8Row *row;     /* [rows] */
} TileArgs;

INLINE void compute_scores(const int rows, const int kind, const TileArgs *t, int row) {
    for (int column = 0; column < t->blocks * BLOCK; column += WIDTH) {
        vf acc[TILE_ROWS * 2];
        const uint32_t *b[2];
        for (int v = 0; v < 2; v++) {
            int at = column + v * LANES;
            b[v] = t->k[at / BLOCK] + at % BLOCK;
        }
        clear(acc, rows * 2);
        multiply(rows, 2, kind, acc, t->q + row * t->lda, t->lda, b, BLOCK, t->dim / 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                store(t->scores + (row + r) * TILE + column + v * LANES, acc[r * 2 + v]);
    }
}

INLINE void add_values(const int rows, const int kind, const TileArgs *t, int row) {
    const size_t step = kind == DOT ? BLOCK / 2 : BLOCK;
    for (int column = 0; column < t->dim; column += WIDTH) {
        vf acc[TILE_ROWS * 2];
        float *out = t->out + row * t->dim + column;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) acc[r * 2 + v] = load(out + r * t->dim + v * LANES);
        for (int block = 0; block < t->blocks; block++) {
            const uint32_t *b[2] = {t->v[block] + column, t->v[block] + column + LANES};
            multiply(rows, 2, kind, acc, t->p + row * t->ldp + block * step, t->ldp, b, t->dim,
                     BLOCK / 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) store(out + r * t->dim + v * LANES, acc[r * 2 + v]);
    }
}

#define KINDS(CALL, ROWS, KIND)                          \
    if ((KIND) == WIDE)                                  \
        CALL(ROWS, WIDE, t, row);                        \
    else if (HAS_DOT && (KIND) == DOT)                   \
        CALL(ROWS, DOT, t, row);                         \
    else                                                 \
        CALL(ROWS, PAIRS, t, row)
#define CASE(CALL, ROWS)                                 \
    case ROWS:                                           \
        KINDS(CALL, ROWS, kind);                         \
        break;
#if TILE_ROWS == 12
#define MORE(CALL) \
    CASE(CALL, 7) CASE(CALL, 8) CASE(CALL, 9) CASE(CALL, 10) CASE(CALL, 11) CASE(CALL, 12)
#else
#define MORE(CALL)
#endif
#define BY_ROWS(NAME, CALL)                                                              \
    static void NAME(const TileArgs *t, int kind, int row, int rows) {                   \
        switch (rows) {                                                                  \
            CASE(CALL, 1)                                                                \
            CASE(CALL, 2)                                                                \
            CASE(CALL, 3)                                                                \
            CASE(CALL, 4)                                                                \
            CASE(CALL, 5)                                                                \
            CASE(CALL, 6)                                                                \
            MORE(CALL)                                                                   \
        }                                                                                \
    }
BY_ROWS(score_rows, compute_scores)
BY_ROWS(value_rows, add_values)

#if !HAS_VNNI
static void compute_all_scores(const TileArgs *t, int kind);
static void add_all_values(const TileArgs *t, int kind);

/* Multiply each row of scores [rows][TILE] by the scales of the units' slots. */
static void scale_columns(const TileArgs *t, const uint32_t *const *units) {
    float scales[TILE] ALIGNED = {0};
    for (int i = 0; i < t->blocks; i++)
        int8_scales((const uint8_t *)units[i], t->dim, scales + i * BLOCK);
    for (int i = 0; i < t->rows * TILE; i += LANES)
        store(t->scores + i, load(t->scores + i) * load(scales + i % TILE));
}

/* Point `wide` to the tile's keys or values in fp32, in `scratch` [blocks][BLOCK * dim]. */
static void widen_tile(const TileArgs *t, const uint32_t *const *units, int is_value,
                       float *scratch, const uint32_t **wide) {
    for (int i = 0; i < t->blocks; i++) {
        float *to = scratch + (size_t)i * BLOCK * t->dim;
        int8_widen((const uint8_t *)units[i], t->dim, is_value, to);
        wide[i] = (const uint32_t *)to;
    }
}
#endif

static void score_bytes(const TileArgs *t) {
#if HAS_VNNI
    int8_scores(t->limbs, t->row, t->k, t->blocks, t->rows, t->dim, t->scores);
#else
    float scratch[TILE * t->dim] ALIGNED;
    TileArgs wide = *t;
    widen_tile(t, t->k, 0, scratch, wide.k);
    wide.k[t->blocks] = wide.k[t->blocks - 1];
    compute_all_scores(&wide, WIDE);
    scale_columns(t, t->k);
#endif
}

static void add_bytes(const TileArgs *t) {
#if HAS_VNNI
    int8_values(t->scores, t->v, t->blocks, t->rows, t->dim, t->out);
#else
    float scratch[TILE * t->dim] ALIGNED;
    TileArgs wide = *t;
    widen_tile(t, t->v, 1, scratch, wide.v);
    scale_columns(t, t->v);
    add_all_values(&wide, WIDE);
#endif
}

static void compute_all_scores(const TileArgs *t, int kind) {
    if (kind == BYTES) {
        score_bytes(t);
        return;
    }
#if HAS_TILES
    if (kind == TILES) {
        tiles_scores((const uint32_t *)t->q, t->k, t->blocks, t->rows, t->dim, t->scores);
        return;
    }
#endif
    for (int row = 0, rows; row < t->rows; row += rows) {
        rows = t->rows - row < TILE_ROWS ? t->rows - row : TILE_ROWS;
        score_rows(t, kind, row, rows);
    }
}

static void add_all_values(const TileArgs *t, int kind) {
    if (kind == BYTES) {
        add_bytes(t);
        return;
    }
#if HAS_TILES
    if (kind == TILES) {
        tiles_values((const uint32_t *)t->p, t->v, t->blocks, t->rows, t->dim, t->out);
        return;
    }
#endif
    for (int row = 0, rows; row < t->rows; row += rows) {
        rows = t->rows - row < TILE_ROWS ? t->rows - row : TILE_ROWS;
        value_rows(t, kind, row, rows);
    }
}

/* Turn a row's scores into probabilities against its running maximum; the keys from `hidden` up to
 * `visible` count. Rescales the row's sum and output when the maximum grows. */
static void softmax_tile(float *scores, int hidden, int visible, float *row_max, float *sum,
                         float *out, int dim) {
    if (visible <= hidden) {
        memset(scores, 0, TILE * 4);
        return;
    }
    for (int i = 0; i < hidden; i++) scores[i] = -INFINITY;
    for (int i = visible; i < TILE; i++) scores[i] = -INFINITY;
    vf best = load(scores);
    for (int i = LANES; i < TILE; i += LANES) best = larger_of(load(scores + i), best);
    float top = max_of(best);
    if (top > *row_max) {
        vf scale = exp_of((vf){0} + (*row_max - top));
        for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * scale);
        store(sum, load(sum) * scale);
        *row_max = top;
    }
    vf total = load(sum);
    for (int i = 0; i < TILE; i += LANES) {
        vf p = exp_of(load(scores + i) - *row_max);
        total += p;
        store(scores + i, p);
    }
    store(sum, total);
}

/* Replace scores s by cap * tanh(s / cap). */
static void cap_scores(float *scores, int count, float cap) {
    for (int i = 0; i < count; i += LANES) {
        const vf e = exp_of(load(scores + i) * (2.0f / cap));
        store(scores + i, cap - 2.0f * cap / (e + 1.0f));
    }
}

/* Attend to the keys of one tile with t->rows rows of the bundle. */
static void attend_tile(const Model *m, const Place *place, TileArgs *t, int tile, int first_token,
                        int window, float *row_max, float *sum, uint32_t *pairs) {
    const int group = m->heads / m->kv_heads;
    const int kind = m->kv_kind;
    compute_all_scores(t, kind);
    if (m->cap > 0) cap_scores(t->scores, t->rows * TILE, m->cap);
    for (int row = 0; row < t->rows; row++) {
        int visible = place->own_keys[first_token + row / group] + 1 - tile * TILE;
        int hidden = window && visible > window ? visible - window : 0;
        softmax_tile(t->scores + row * TILE, hidden, visible < TILE ? visible : TILE,
                     row_max + row, sum + row * LANES, t->out + row * t->dim, t->dim);
    }
    t->p = t->scores;
    t->ldp = TILE;
    if (takes_pairs(kind)) {
        to_pairs(t->scores, pairs, t->rows * TILE);
        t->p = (const float *)pairs;
        t->ldp = TILE / 2;
    }
    add_all_values(t, kind);
}

/* Return the first tile of a segment that overlaps the window of one of its tokens. */
static int first_tile(const Place *place, const Segment *s, int window) {
    int lowest = place->own_keys[s->first];
    for (int token = s->first; token < s->end; token++)
        if (place->own_keys[token] < lowest) lowest = place->own_keys[token];
    const int tile = window && lowest >= window ? (lowest + 1 - window) / TILE : 0;
    return tile > s->tile_first ? tile : s->tile_first;
}

/* Return the factor of a query's scores. */
static float scale_of(const Model *m, int position) {
    if (!m->growth_context) return m->scale;
    return m->scale * (1.0f + m->growth * log1pf((float)(position / m->growth_context)));
}

void attend(const Model *m, const Work *w, int layer, int bundle, int kv_head) {
    const Place *place = w->place + m->layer[layer].group;
    const Bundle *b = place->bundle + bundle;
    const int window = m->layer[layer].window;
    const int dim = m->head_dim, group = m->heads / m->kv_heads;
    const int rows = (b->end - b->first) * group;
    const int width = (m->heads + 2 * m->kv_heads) * dim;
    float q[rows * dim] ALIGNED, out[rows * dim] ALIGNED, scores[rows * TILE] ALIGNED;
    float row_max[rows], sum[rows * LANES] ALIGNED;
    uint32_t pairs[rows * TILE / 2] ALIGNED;
    uint32_t q_pairs[takes_pairs(m->kv_kind) ? rows * dim / 2 : 1] ALIGNED;
    const float *sinks = m->layer[layer].sinks;
    memset(out, 0, (size_t)rows * dim * 4);
    memset(sum, 0, (size_t)rows * LANES * 4);
    for (int row = 0; row < rows; row++) {
        const int token = b->first + row / group, head = kv_head * group + row % group;
        const float *from = w->qkv + (size_t)token * width + head * dim;
        const float scale = scale_of(m, w->positions[token]);
        for (int d = 0; d < dim; d++) q[row * dim + d] = from[d] * scale;
        row_max[row] = sinks ? sinks[head] : -1e30f;
        if (sinks) sum[row * LANES] = 1.0f;
    }
    if (takes_pairs(m->kv_kind)) to_pairs(q, q_pairs, rows * dim);
    const int is_cut = HAS_VNNI && m->kv_kind == BYTES;
    int8_t limbs[is_cut ? rows * 2 * dim : 1] ALIGNED;
    Int8Row cut[is_cut ? rows : 1];
#if HAS_VNNI
    for (int row = 0; is_cut && row < rows; row++)
        int8_query(q + row * dim, dim, limbs + row * 2 * dim, cut + row);
#endif
    for (int at = b->segment; at < b->segment_end; at++) {
        const Segment *s = place->segment + at;
        const int row = (s->first - b->first) * group;
        const int keys = place->own_keys[s->end - 1] + 1;
        TileArgs t = {.out = out + row * dim, .scores = scores + row * TILE, .dim = dim,
                   .rows = (s->end - s->first) * group, .lda = dim, .q = q + row * dim};
        if (takes_pairs(m->kv_kind)) {
            t.q = (const float *)(q_pairs + row * dim / 2);
            t.lda = dim / 2;
        }
        if (is_cut) {
            t.limbs = limbs + row * 2 * dim;
            t.row = cut + row;
        }
        for (int tile = first_tile(place, s, window); tile < s->tile_end; tile++) {
            const int32_t *table = place->tables + s->table + tile * (TILE / BLOCK);
            int blocks = (keys - tile * TILE + BLOCK - 1) / BLOCK;
            t.blocks = blocks < TILE / BLOCK ? blocks : TILE / BLOCK;
            for (int i = 0; i < t.blocks; i++) {
                t.k[i] = keys_of(m, table[i], layer, kv_head);
                t.v[i] = values_of(m, table[i], layer, kv_head);
            }
            t.k[t.blocks] = t.k[t.blocks - 1]; /* a vector of scores may span two blocks */
            attend_tile(m, place, &t, tile, s->first, window, row_max + row, sum + row * LANES,
                        pairs);
        }
    }
    for (int row = 0; row < rows; row++) {
        const size_t token = (size_t)(b->first + row / group);
        const size_t at = (token * m->heads + kv_head * group + row % group) * dim;
        const float total = sum_of(load(sum + row * LANES));
        for (int d = 0; d < dim; d++) out[row * dim + d] /= total;
        if (m->layer[layer].gate)
            for (int d = 0; d < dim; d += LANES) {
                const vf gate = 1.0f + exp_of(-load(w->gates + at + d));
                store(out + row * dim + d, load(out + row * dim + d) / gate);
            }
        if (takes_pairs(m->kind))
            to_pairs(out + row * dim, (uint32_t *)w->attended + at / 2, dim);
        else
            memcpy(w->attended + at, out + row * dim, (size_t)dim * 4);
    }
}
