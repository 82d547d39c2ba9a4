/* Linear maps, norms and packing. Weights are stored in panels of 16 columns, so that a tile of the
 * product reads them once and sequentially, for one row of activations or thousands. */
#include "cpu.h"

#include <math.h>

#define WIDTH 32          /* columns computed together: two panels */
#define CACHED (192 * 1024) /* bytes of activations that should stay in the L2 cache */
#define ROWS_MAX 32       /* rows computed together, of any kind */
#define CHUNK 16          /* rows of a task that converts them */
#define AHEAD 16          /* lines of a panel that are asked for before their turn */
#define PACKED 16         /* panels of a task that packs them */
#define LINE 16           /* words of a line of the cache */

/* Return the words of one panel, as it is multiplied. */
static size_t panel_words(const Product *p) {
    return (size_t)PANEL * (p->kind == WIDE ? p->depth : p->depth / 2);
}

size_t packed_words(int packing, int kind, int depth) {
    if (packing == MXFP4) return mxfp4_words(depth);
    if (has_codes(packing)) return codes_words(packing, depth);
    return (size_t)PANEL * (kind == WIDE ? depth : depth / 2);
}

#if HAS_DOT
/* Do what `multiply` does for one row by DOT, whose time is the memory's, and ask for each line
 * AHEAD of its turn: the CPU foresees the lines of a panel, but not the panels that follow. The line
 * goes to the L2 cache; fetched into L1, it takes the place of a load that waits. `skip`: words
 * between the end of a panel and the start of the one that the row takes next. */
INLINE void multiply_row(const int vecs, vf *acc, const float *a, const uint32_t *const *b,
                         size_t skip, int pairs) {
#pragma GCC unroll 1
    for (int p = 0; p < pairs; p++) {
        const size_t ahead = (size_t)(p + AHEAD) * PANEL + (p + AHEAD < pairs ? 0 : skip);
        int word;
        memcpy(&word, a + p, 4);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 16
        for (int v = 0; v < vecs; v++) {
            _mm_prefetch((const char *)(b[v] + ahead), _MM_HINT_T1);
            const __m512bh w = (__m512bh)_mm512_loadu_si512(b[v] + (size_t)p * PANEL);
            acc[v] = (vf)_mm512_dpbf16_ps((__m512)acc[v], x, w);
        }
    }
}
#else
#define multiply_row(...) ((void)0)
#endif

#define TILE_OF(ROWS, VECS)                                                                   \
    static void tile_##ROWS##_##VECS(const Product *p, const float *a, const uint32_t *b,     \
                                     size_t lda, float *out, int width) {                     \
        const size_t panel = panel_words(p);                                                  \
        for (int column = 0; column < width; column += (VECS) * LANES) {                      \
            const uint32_t *columns[VECS];                                                    \
            vf acc[(ROWS) * (VECS)];                                                          \
            for (int v = 0; v < (VECS); v++) {                                                \
                int at = column + v * LANES;                                                  \
                columns[v] = b + at / PANEL * panel + at % PANEL;                             \
            }                                                                                 \
            clear(acc, (ROWS) * (VECS));                                                      \
            if (p->kind == WIDE)                                                              \
                multiply(ROWS, VECS, WIDE, acc, a, lda, columns, PANEL, p->depth / 2);        \
            else if (HAS_DOT && p->kind == DOT && (ROWS) == 1)                                \
                multiply_row(VECS, acc, a, columns, ((VECS) - 1) * panel, p->depth / 2);      \
            else if (HAS_DOT && p->kind == DOT)                                               \
                multiply(ROWS, VECS, DOT, acc, a, lda, columns, PANEL, p->depth / 2);         \
            else                                                                              \
                multiply(ROWS, VECS, PAIRS, acc, a, lda, columns, PANEL, p->depth / 2);       \
            for (int r = 0; r < (ROWS); r++)                                                  \
                for (int v = 0; v < (VECS); v++)                                              \
                    store(out + r * 64 + column + v * LANES, acc[r * (VECS) + v]);            \
        }                                                                                     \
    }

/* With one row, each vector is one chain of additions: more vectors hide the addition's latency. */
#if LANES == 8
TILE_OF(1, 8)
TILE_OF(1, 4)
TILE_OF(2, 4)
#else
TILE_OF(1, 4)
TILE_OF(1, 2)
TILE_OF(2, 2)
#endif
TILE_OF(3, 2)
TILE_OF(4, 2)
TILE_OF(5, 2)
TILE_OF(6, 2)
#if TILE_ROWS == 12
TILE_OF(7, 2)
TILE_OF(8, 2)
TILE_OF(9, 2)
TILE_OF(10, 2)
TILE_OF(11, 2)
TILE_OF(12, 2)
#endif

typedef void (*Tile)(const Product *, const float *, const uint32_t *, size_t, float *, int);

static const Tile OF_ROWS[] = {
    NULL,
#if LANES == 8
    tile_1_4,
    tile_2_4,
#else
    tile_1_2,
    tile_2_2,
#endif
    tile_3_2,
    tile_4_2,
    tile_5_2,
    tile_6_2,
#if TILE_ROWS == 12
    tile_7_2,
    tile_8_2,
    tile_9_2,
    tile_10_2,
    tile_11_2,
    tile_12_2,
#endif
};

INLINE vf smaller_of(vf a, vf b) { return -larger_of(-a, -b); }

/* Return activation(gate) * up of an epilogue. */
INLINE vf gated(int epilogue, vf gate, vf up) {
    vf at_gate = gate;
    if (epilogue == GELU) /* by tanh: gate * sigmoid(2 * sqrt(2 / pi) * (gate + ...)) */
        at_gate = 1.59576912160573f * (gate + 0.044715f * gate * gate * gate);
    if (epilogue == CLAMPED) {
        const vf limit = (vf){0} + 7.0f;
        gate = smaller_of(limit, gate);
        up = smaller_of(limit, larger_of(-limit, up)) + 1.0f;
        at_gate = 1.702f * gate;
    }
    return gate / (1.0f + exp_of(-at_gate)) * up;
}

/* Write `out` [rows][64], of which `width` columns are computed, to c by the epilogue. Inside its
 * caller it would take registers from loops of products. */
__attribute__((noinline)) static void finish(const Product *p, float *out, int row, int rows,
                                             int column, int width) {
    for (int r = 0; r < rows; r++, out += 64) {
        float *c = p->c + (size_t)(row + r) * p->columns;
        if (p->bias)
            for (int i = 0; i < width; i += LANES)
                store(out + i, load(out + i) + load(p->bias + column + i));
        if (p->epilogue == SQUARED)
            for (int i = 0; i < width; i += LANES) {
                const vf x = larger_of(load(out + i), (vf){0});
                store(out + i, x * x);
            }
        if (is_gated(p->epilogue)) {
            for (int at = 0; at < width; at += WIDTH) {
                int first = (column + at) / 2;
                for (int i = 0; i < PANEL && first < p->columns; i += LANES) {
                    vf gate = load(out + at + i), up = load(out + at + PANEL + i);
                    vf value = gated(p->epilogue, gate, up);
                    int count = p->columns - first - i;
#if HAS_DOT
                    if (p->c_pairs) {
                        const __m256bh both = _mm512_cvtneps_pbh((__m512)value);
                        const size_t at_word = ((size_t)(row + r) * p->columns + first + i) / 2;
                        memcpy(p->c_pairs + at_word, &both, sizeof both);
                        continue;
                    }
#endif
                    if (count > 0)
                        memcpy(c + first + i, &value, (count < LANES ? count : LANES) * 4);
                }
            }
            continue;
        }
        int count = p->columns - column < width ? p->columns - column : width;
        if (p->epilogue == ADD)
            for (int i = 0; i < count; i++) c[column + i] += out[i];
        else if (p->epilogue == SQUARED && p->c_pairs)
            to_pairs(out, p->c_pairs + ((size_t)(row + r) * p->columns + column) / 2, count);
        else
            memcpy(c + column, out, (size_t)count * 4);
    }
}

typedef struct {
    const Product *p;
    int rows, columns;             /* per task */
    int row_pieces, column_pieces; /* tasks are column pieces of row pieces */
    int padded;                    /* columns in b */
} Pieces;

int takes_left(int kind, int packing) { return takes_pairs(kind) || has_codes(packing); }

size_t left_words(int kind, int packing, int depth) {
    if (HAS_MADD && has_codes(packing)) return depth / 2 + 2 * codes_groups(packing, depth);
    return takes_pairs(kind) ? depth / 2 : depth;
}

void to_left(int kind, int packing, const float *x, uint32_t *out, int rows, int depth) {
    if (HAS_MADD && has_codes(packing))
        codes_rows(packing, x, out, rows, depth);
    else if (takes_pairs(kind))
        to_pairs(x, out, rows * depth);
    else
        memcpy(out, x, (size_t)rows * depth * 4);
}

static void multiply_piece(const Pieces *s, int task) {
    const Product *p = s->p;
    const size_t lda = left_words(p->kind, p->packing, p->depth);
    const float *a = takes_left(p->kind, p->packing) ? (const float *)p->pairs : p->a;
    int row_first = task % s->row_pieces * s->rows;
    int column_first = task / s->row_pieces * s->columns;
    int row_end = row_first + s->rows < p->rows ? row_first + s->rows : p->rows;
    int column_end = column_first + s->columns < s->padded ? column_first + s->columns : s->padded;
    float out[ROWS_MAX * 64] ALIGNED;
    const int tile_rows = HAS_TILES && p->kind == TILES ? ROWS_MAX : TILE_ROWS;
    size_t own = panel_words(p); /* of an unpacked panel */
#if HAS_CODES
    const int is_coded = has_codes(p->packing);
    if (is_coded) own = codes_unpacked_words(p->packing, p->depth);
    const int groups = codes_groups(p->packing, p->depth);
    float sums[is_coded && HAS_DOT ? (row_end - row_first) * groups : 1];
    if (is_coded && HAS_DOT)
        codes_sums(p->packing, (const uint32_t *)a + row_first * lda, lda, row_end - row_first,
                   p->depth, sums);
#endif
    uint32_t unpacked[p->packing ? 2 * own : 1] ALIGNED;
    for (int column = column_first, width; column < column_end; column += width) {
        const size_t words = packed_words(p->packing, p->kind, p->depth);
        const uint32_t *b = p->b + column / PANEL * words;
#if HAS_CODES
        if (is_coded) {
            width = p->rows <= 2 && column + 64 <= column_end ? 64 : WIDTH;
            if (p->rows <= CODES_ROWS) {
                codes_few(p->packing, (const uint32_t *)a, lda, sums, b, p->rows, p->depth, out,
                          width);
                finish(p, out, 0, p->rows, column, width);
                continue;
            }
            unpack_codes(p->packing, b, p->depth, unpacked);
            unpack_codes(p->packing, b + words, p->depth, unpacked + own);
            for (int row = row_first, rows; row < row_end; row += rows) {
                rows = row_end - row < TILE_ROWS ? row_end - row : TILE_ROWS;
                codes_many(p->packing, (const uint32_t *)a + row * lda, lda,
                           HAS_DOT ? sums + (row - row_first) * groups : sums, unpacked, rows, p->depth, out);
                finish(p, out, row, rows, column, width);
            }
            continue;
        }
#endif
        if (p->packing == MXFP4) {
            const uint32_t *packed = b;
#if HAS_DOT
            if (p->kind == DOT && p->rows <= MXFP4_ROWS) {
                width = column + 64 <= column_end ? 64 : WIDTH;
                mxfp4_product(a, lda, packed, p->rows, p->depth, out, width);
                finish(p, out, 0, p->rows, column, width);
                continue;
            }
#endif
            unpack_mxfp4(packed, p->depth, unpacked);
            unpack_mxfp4(packed + words, p->depth, unpacked + own);
            b = unpacked;
        }
        int is_wide = p->rows == 1 || (HAS_TILES && p->kind == TILES && p->rows <= 16);
        width = is_wide && !p->packing && column + 64 <= column_end ? 64 : WIDTH;
        for (int row = row_first, rows; row < row_end; row += rows) {
            rows = row_end - row < tile_rows ? row_end - row : tile_rows;
#if HAS_TILES
            if (p->kind == TILES) {
                tiles_product((const uint32_t *)a + row * lda, lda, b, rows, p->depth, out, width);
                finish(p, out, row, rows, column, width);
                continue;
            }
#endif
            Tile tile = OF_ROWS[rows];
#if LANES == 8
            if (width == 64) tile = tile_1_8;
#else
            if (width == 64) tile = tile_1_4;
#endif
            tile(p, a + row * lda, b, lda, out, width);
            finish(p, out, row, rows, column, width);
        }
    }
}

static void product_task(void *arg, int task) { multiply_piece(arg, task); }

static void pairs_task(void *arg, int task) {
    Product *p = arg;
    const int row = task * CHUNK, left = p->rows - row, rows = left < CHUNK ? left : CHUNK;
    to_left(p->kind, p->packing, p->a + (size_t)row * p->depth,
            p->pairs + row * left_words(p->kind, p->packing, p->depth), rows, p->depth);
}

static Pieces cut(const Product *p) {
    Pieces s = {p, 0, 64, 1, 1, 0};
    int columns = is_gated(p->epilogue) ? 2 * ((p->columns + PANEL - 1) / PANEL * PANEL) : p->columns;
    s.padded = (columns + WIDTH - 1) / WIDTH * WIDTH;
    const int step = p->kind == TILES ? ROWS_MAX : TILE_ROWS;
    s.rows = CACHED / (takes_left(p->kind, p->packing) ? 2 : 4) / p->depth / step * step;
    if (s.rows < step) s.rows = step;
    s.row_pieces = (p->rows + s.rows - 1) / s.rows;
    if (s.row_pieces == 1) s.rows = p->rows;
    if (s.padded > 64 * 64) s.columns = (s.padded / 64 + 63) / 64 * 64;
    s.column_pieces = (s.padded + s.columns - 1) / s.columns;
    return s;
}

void product(Pool *pool, Product *p) {
    if (!p->rows) return;
    if (takes_left(p->kind, p->packing) && !p->has_pairs) {
        if (p->rows > CHUNK)
            pool_run(pool, pairs_task, p, (p->rows + CHUNK - 1) / CHUNK);
        else
            pairs_task(p, 0);
    }
    Pieces s = cut(p);
    pool_run(pool, product_task, &s, s.row_pieces * s.column_pieces);
}

typedef struct {
    const Pieces *pieces;
    const int *first; /* a product's first task; behind the last the number of tasks */
    int count;
} Group;

static void grouped_task(void *arg, int task) {
    const Group *g = arg;
    int low = 0, high = g->count; /* the product is in [low, high) */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (g->first[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    multiply_piece(g->pieces + low, task - g->first[low]);
}

void grouped_products(Pool *pool, const Product *products, int count) {
    Pieces pieces[count + 1];
    int first[count + 1];
    first[0] = 0;
    for (int i = 0; i < count; i++) {
        pieces[i] = cut(products + i);
        first[i + 1] = first[i] + pieces[i].row_pieces * pieces[i].column_pieces;
    }
    Group g = {pieces, first, count};
    pool_run(pool, grouped_task, &g, first[count]);
}

/* Write x / rms(x) * weight of one row. `channels` is a multiple of 16. */
void rms_norm(const float *x, const float *weight, float *out, int channels, float eps) {
    vf total = {0};
    for (int i = 0; i < channels; i += LANES) {
        vf v = load(x + i);
        total += v * v;
    }
    float scale = 1.0f / sqrtf(sum_of(total) / (float)channels + eps);
    for (int i = 0; i < channels; i += LANES)
        store(out + i, load(x + i) * scale * load(weight + i));
}

/* Write (x - mean(x)) / deviation(x) * weight of one row. `channels` is a multiple of 16. */
void mean_norm(const float *x, const float *weight, float *out, int channels, float eps) {
    vf total = {0}, squares = {0};
    for (int i = 0; i < channels; i += LANES) total += load(x + i);
    const float mean = sum_of(total) / (float)channels;
    for (int i = 0; i < channels; i += LANES) {
        vf v = load(x + i) - mean;
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)channels + eps);
    for (int i = 0; i < channels; i += LANES)
        store(out + i, (load(x + i) - mean) * scale * load(weight + i));
}

/* Convert fp32 to words of two bf16. */
void to_pairs(const float *x, uint32_t *out, int count) {
    int i = 0;
#if HAS_DOT
    for (; i + LANES <= count / 2; i += LANES) {
        /* The instruction flushes subnormal numbers to 0, which no product can tell apart: it
         * flushes subnormal factors too. */
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(x + 2 * i + LANES),
                                                  (__m512)load(x + 2 * i));
        memcpy(out + i, &both, sizeof both);
    }
#endif
    for (; i < count / 2; i++)
        out[i] = (uint32_t)to_bf16(x[2 * i]) | (uint32_t)to_bf16(x[2 * i + 1]) << 16;
}

typedef struct {
    const char *weight;
    uint32_t *b;
    const int32_t *from;
    int count, words;
} Packing;

/* Pack PACKED panels, a line of 16 rows at a time: the words that it reads and the lines that it
 * writes stay in the L1 cache. */
static void pack_task(void *arg, int task) {
    const Packing *p = arg;
    const int left = p->count / PANEL - task * PACKED;
    for (int panel = task * PACKED; panel < task * PACKED + (left < PACKED ? left : PACKED); panel++)
        for (int k = 0; k < p->words; k += LINE) {
            const int end = k + LINE < p->words ? k + LINE : p->words;
            uint32_t *to = p->b + (size_t)panel * PANEL * p->words;
            for (int lane = 0; lane < PANEL; lane++) {
                const int32_t row = p->from[panel * PANEL + lane];
                const char *from = p->weight + (ptrdiff_t)row * p->words * 4;
                for (int i = k; i < end; i++)
                    if (row < 0)
                        to[(size_t)i * PANEL + lane] = 0;
                    else
                        memcpy(to + (size_t)i * PANEL + lane, from + (size_t)i * 4, 4);
            }
        }
}

/* Write weight [columns, words] to b in panels; a word is one fp32 or two bf16. `from`: the weight's
 * row of each of `count` columns of b, -1 for padding; `count` is a multiple of 32. */
void pack(Pool *pool, const void *weight, void *b, const int32_t *from, int count, int words) {
    pool_run(pool, pack_task, &(Packing){weight, b, from, count, words},
             (count / PANEL + PACKED - 1) / PACKED);
}

/* Return whether codes of 4 and 8 bits are multiplied as they are. */
int multiplies_codes(void) { return HAS_CODES && !HAS_TILES; }

/* Return whether the CPU multiplies bf16 directly. */
int has_dot(void) { return HAS_DOT; }

/* Return the number of which head_dim must be a multiple. */
int head_dim_step(void) { return 2 * LANES; }
