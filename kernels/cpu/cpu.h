/* Declarations shared by the CPU kernels: vectors, matrix tiles, the thread pool, and the structs
 * of a step.
 *
 * Vectors are the GCC and clang extension, so the code works on any CPU; with -march=native the
 * compiler picks AVX2, AVX-512 or NEON. Two rules make the bits of a row independent of the rest of
 * the batch: each output is summed over k in ascending order in one accumulator, however many rows
 * and columns are computed at once; and keys are taken in tiles of TILE keys at fixed positions, in
 * ascending order, and each row rescales for itself.
 */
#ifndef TRUNKLINE_CPU_H
#define TRUNKLINE_CPU_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 12
#else
#define LANES 8
#define TILE_ROWS 6
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

#if HAS_DOT && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

/* Codes of 4 and 8 bits are multiplied by pairs of bf16, and where there are none by pairs of 16-bit
 * integers (cpu_codes_avx2.c). */
#if !HAS_DOT && defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define HAS_MADD 1
#else
#define HAS_MADD 0
#endif
#define HAS_CODES (HAS_DOT || HAS_MADD)

#define PANEL 16 /* columns of a weight panel */
#define BLOCK 16 /* slots of a KV block */
#define TILE 64  /* keys of a tile */
#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

INLINE vf load(const void *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(void *p, vf v) { memcpy(p, &v, sizeof v); }

/* Keep `count` sums in registers here, and the loads that follow behind this point. In a tile that
 * just fits the registers, a compiler that loads the factors of the next rows early or moves sums
 * between registers sends some of them through the stack. Generates no instruction. */
INLINE void hold(vf *sums, const int count) {
#if defined(__AVX__) /* elsewhere a `vf` is no register */
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) __asm__ volatile("" : "+v"(sums[i]) : : "memory");
#endif
}

/* Set `count` sums to 0. By memset, gcc would keep them in memory too. */
INLINE void clear(vf *sums, const int count) {
#pragma GCC unroll 32
    for (int i = 0; i < count; i++) sums[i] = (vf){0};
}

INLINE float sum_of(vf v) {
    float s[LANES];
    memcpy(s, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

/* Convert fp32 to bf16, rounding to nearest even; NaN stays NaN. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Return e^x within 2 units in the last place for -87 <= x <= 88, 0 below -87 and NaN for NaN.
 * Polynomial of Cephes' expf. */
INLINE vf exp_of(vf x) {
#if defined(__AVX512F__)
    const __mmask16 tiny = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    x = (vf)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x); /* min returns its second for NaN */
    vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vi tiny = x < -87.0f;
    x = (vf)(((vi)x & (x <= 88.0f)) | ((vi)((vf){0} + 88.0f) & (x > 88.0f)) | ((vi)x & (x != x)));
    vf t = x * 1.44269504088896341f + magic;
    vf n = t - magic;
#endif
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_mask_scalef_ps(_mm512_setzero_ps(), (__mmask16)~tiny, (__m512)p, (__m512)n);
#else
    vi scale = ((vi)t - 0x4b400000 + 127) << 23;
    return (vf)((vi)(p * (vf)scale) & ~tiny);
#endif
}

/* Return the largest lane. */
INLINE float max_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float s[LANES];
    memcpy(s, &v, sizeof v);
    float largest = s[0];
    for (int i = 1; i < LANES; i++) largest = s[i] > largest ? s[i] : largest;
    return largest;
#endif
}

/* Return the larger of each pair of lanes. */
INLINE vf larger_of(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vi more = a > b;
    return (vf)(((vi)a & more) | ((vi)b & ~more));
#endif
}

/* Kinds of storage of a right-hand side.
 *   WIDE   fp32, [k][column]
 *   PAIRS  bf16, [k / 2][column], words of (k even: low half, k odd: high half)
 *   DOT    as PAIRS, multiplied two at a time; the left-hand side is in bf16 pairs too
 *   TILES  as DOT, multiplied 16 rows by 16 columns by 32 k at a time (AMX; cpu_tiles.c)
 *   BYTES  KV alone: 8 bits with a scale for each token (cpu_kv_int8.c)
 */
enum { WIDE = 0, PAIRS = 1, DOT = 2, TILES = 3, BYTES = 4 };

/* Return whether the left-hand side of a product of this kind is in bf16 pairs. */
INLINE int takes_pairs(int kind) { return kind == DOT || kind == TILES; }

/* Add to acc[r][v] the products of `rows` rows of a and the columns at b[v], over `pairs` pairs of
 * k. b[v] points to LANES columns of the first k (or pair); the next k is `stride` words further. A
 * row of a has `lda` floats, or words of two bf16 when `kind` is DOT.
 */
INLINE void multiply(const int rows, const int vecs, const int kind, vf *acc, const float *a,
                     size_t lda, const uint32_t *const *b, size_t stride, int pairs) {
    const vu high = (vu){0} + 0xffff0000u;
#pragma GCC unroll 1
    for (int p = 0; p < pairs; p++) {
        if (kind == DOT) {
#if HAS_DOT
            /* Columns inside rows: with rows inside, the broadcasts of all rows would be kept. */
            __m512bh w[8];
#pragma GCC unroll 16
            for (int v = 0; v < vecs; v++)
                w[v] = (__m512bh)_mm512_loadu_si512(b[v] + p * stride);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                int word;
                memcpy(&word, a + r * lda + p, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 16
                for (int v = 0; v < vecs; v++)
                    acc[r * vecs + v] =
                        (vf)_mm512_dpbf16_ps((__m512)acc[r * vecs + v], x, w[v]);
                hold(acc + r * vecs, vecs);
            }
#endif
            continue;
        }
        if (rows == 1 && kind == PAIRS) {
            /* Both halves of a vector at once: with all vectors loaded first, eight of them and
             * their sums are more than AVX2's registers. */
#pragma GCC unroll 16
            for (int v = 0; v < vecs; v++) {
                const vu w = (vu)load(b[v] + p * stride);
                acc[v] += (vf)(w << 16) * a[2 * p];
                acc[v] += (vf)(w & high) * a[2 * p + 1];
            }
            continue;
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vf w[8];
#pragma GCC unroll 16
            for (int v = 0; v < vecs; v++) {
                if (kind == WIDE)
                    w[v] = load(b[v] + (2 * (size_t)p + half) * stride);
                else if (half == 0)
                    w[v] = (vf)((vu)load(b[v] + p * stride) << 16);
                else
                    w[v] = (vf)((vu)load(b[v] + p * stride) & high);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const float x = a[r * lda + 2 * p + half];
#pragma GCC unroll 16
                for (int v = 0; v < vecs; v++) acc[r * vecs + v] += w[v] * x;
                hold(acc + r * vecs, vecs);
            }
        }
    }
}

/* -- threads (cpu_threads.c) ---------------------------------------------------------------- */

typedef struct Pool Pool;
typedef void (*Task)(void *arg, int index);

Pool *pool_new(int threads);
void pool_free(Pool *pool);
/* Run `task` for 0 .. tasks - 1 on the calling thread and the pool; return when all are done. */
void pool_run(Pool *pool, Task task, void *arg, int tasks);

/* -- matrices (cpu_linear.c) ---------------------------------------------------------------- */

enum { STORE = 0, ADD = 1, SILU = 2, GELU = 3, CLAMPED = 4, SQUARED = 5 };

/* Return whether an epilogue reads panels of gate and up in turns. */
INLINE int is_gated(int epilogue) { return epilogue >= SILU && epilogue <= CLAMPED; }
enum { NOT_PACKED = 0, MXFP4 = 1, INT4 = 2, INT8 = 3, INT8_16 = 4 };

/* STORE: c [rows, columns] = a [rows, depth] x b + bias. ADD: += instead of =. SILU: b's panels are
 * gate and up in turns, and c [rows, columns] = silu(gate) * up; GELU: gelu(gate) * up; CLAMPED:
 * gpt-oss's, of clamped gate and up. SQUARED: c = (what is above 0) squared. b is in the layout of
 * `pack`; `bias` has a value for each of its columns, or is NULL. `pairs`: scratch of rows * depth
 * / 2 words when the kind is DOT or TILES. TILES: depth is a multiple of 32. `packing`: b is in the
 * layout of `pack_mxfp4`, the kind not WIDE, or in one of cpu_codes.c, the kind DOT, or PAIRS with
 * HAS_MADD; else NOT_PACKED. `pairs` is then scratch of rows * depth words. `has_pairs`: what computed a has put it into `pairs`, and a is not read. `c_pairs`:
 * [rows, columns / 2], where the values go as bf16 pairs instead of c; or NULL. Not of STORE and
 * ADD, with HAS_DOT; columns are a multiple of PANEL. */
typedef struct {
    const float *a;
    const uint32_t *b;
    float *c;
    uint32_t *pairs;
    int rows, depth, columns, kind, epilogue;
    const float *bias;
    int packing, has_pairs;
    uint32_t *c_pairs;
} Product;

void product(Pool *pool, Product *p);
/* Compute products of at least one row each in one phase; `pairs` has their left-hand sides already
 * where their kind takes them. */
void grouped_products(Pool *pool, const Product *products, int count);
void rms_norm(const float *x, const float *weight, float *out, int channels, float eps);
void mean_norm(const float *x, const float *weight, float *out, int channels, float eps);
void to_pairs(const float *x, uint32_t *out, int count);
/* Return whether products of this kind and packing read `pairs` and not a. */
int takes_left(int kind, int packing);
/* Return the words of a row of `pairs`, or of a. */
size_t left_words(int kind, int packing, int depth);
/* Write rows x [rows, depth] as such products read them. */
void to_left(int kind, int packing, const float *x, uint32_t *out, int rows, int depth);

/* -- MXFP4 (cpu_mxfp4.c) -------------------------------------------------------------------- */

/* Return the words of a panel. */
size_t mxfp4_words(int depth);
/* Return the words of one panel of a product's right-hand side. */
size_t packed_words(int packing, int kind, int depth);
int pack_mxfp4(const uint16_t *weight, uint32_t *b, const int32_t *from, int count, int depth);
void unpack_mxfp4(const uint32_t *panel, int depth, uint32_t *out);
#define MXFP4_ROWS 4 /* up to so many rows are multiplied as the weights are unpacked, by DOT */
/* Write to out [rows][64] the product of a [rows][lda] bf16 pairs and `width` columns (32 or 64) at
 * b. Built where HAS_DOT. */
void mxfp4_product(const float *a, size_t lda, const uint32_t *b, int rows, int depth, float *out,
                   int width);

/* -- codes of 4 and 8 bits (cpu_codes.c, cpu_codes_avx2.c) ------------------------------------- */

/* Return the values of a group; INT8_16 are 8 bits in smaller groups. */
INLINE int group_of(const int packing) { return packing == INT8_16 ? 16 : 32; }

/* Return the words of a group in a panel. */
INLINE int group_words(const int packing) {
    return PANEL + group_of(packing) * PANEL / (packing == INT4 ? 8 : 4);
}

/* Return the groups of a column or a row. */
INLINE int codes_groups(const int packing, int depth) { return depth / group_of(packing); }

int has_codes(int packing);
size_t codes_words(int packing, int depth);
/* With HAS_MADD: write rows x [rows, depth], each as pairs of 16-bit integers, and behind them a
 * scale and the sum of the values for each group. */
void codes_rows(int packing, const float *x, uint32_t *out, int rows, int depth);
/* The following are built where HAS_CODES. */
/* With HAS_DOT: write the sums of the groups of a [rows][lda] bf16 pairs: [rows][groups]. With
 * HAS_MADD rows have them, and `sums` is not read. */
void codes_sums(int packing, const uint32_t *a, size_t lda, int rows, int depth, float *sums);
size_t codes_unpacked_words(int packing, int depth);
void unpack_codes(int packing, const uint32_t *panel, int depth, uint32_t *out);
#define CODES_ROWS 4 /* up to so many rows are multiplied as codes are unpacked */
/* Write to out [rows][64] the product of a and `width` columns at b: 32, or of up to 2 rows 64. */
void codes_few(int packing, const uint32_t *a, size_t lda, const float *sums, const uint32_t *b,
               int rows, int depth, float *out, int width);
/* The same of 32 columns and any number of rows, with both panels unpacked at `codes`. */
void codes_many(int packing, const uint32_t *a, size_t lda, const float *sums,
                const uint32_t *codes, int rows, int depth, float *out);
void unpack_column(int packing, const uint32_t *panel, int lane, int depth, float *out);

/* -- AMX tiles (cpu_tiles.c); built where HAS_TILES ------------------------------------------- */

/* Write to out [rows][64] the product of a [rows][lda] bf16 pairs and `width` columns (32 or 64) at
 * b, panels of `depth / 2` lines. */
void tiles_product(const uint32_t *a, size_t lda, const uint32_t *b, int rows, int depth,
                   float *out, int width);
/* Write to scores [rows][TILE] the products of q [rows][dim / 2] and the keys of `blocks` blocks. */
void tiles_scores(const uint32_t *q, const uint32_t *const *k, int blocks, int rows, int dim,
                  float *scores);
/* Add to out [rows][dim] the products of p [rows][TILE / 2] and the values of `blocks` blocks. */
void tiles_values(const uint32_t *p, const uint32_t *const *v, int blocks, int rows, int dim,
                  float *out);

/* -- KV of 8 bits (cpu_kv_int8.c) ------------------------------------------------------------ */

/* Round x [dim], a token's key or value, into its slot of a unit. */
void int8_write(const float *x, int dim, int is_value, int slot, uint8_t *unit);
/* Write the unit's 16 scales. */
void int8_scales(const uint8_t *unit, int dim, float *out);
/* Write the unit's values without their scales, as a block of K or V of the kind WIDE. */
void int8_widen(const uint8_t *unit, int dim, int is_value, float *out);

/* A query rounded to 16 bits. `start`: where the sums of its limbs with a key's 128 + k begin. */
typedef struct {
    float scale;
    int32_t start[2];
} Int8Row;

/* The following are built where HAS_VNNI; `dim` is a multiple of 32. */
/* Round a query [dim] to limbs [2][dim]: 256 times the first plus the second, times a scale. */
void int8_query(const float *q, int dim, int8_t *limbs, Int8Row *row);
/* Write to scores [rows][TILE] the products of limbs [rows][2][dim] and the keys of `blocks`
 * blocks; k[blocks] is read and does not count. */
void int8_scores(const int8_t *limbs, const Int8Row *row, const uint32_t *const *k, int blocks,
                 int rows, int dim, float *scores);
/* Add to out [rows][dim] the products of p [rows][TILE] and the values of `blocks` blocks. */
void int8_values(const float *p, const uint32_t *const *v, int blocks, int rows, int dim,
                 float *out);

/* -- the step ------------------------------------------------------------------------------- */

enum { SOFTMAX = 0, SIGMOID = 1, CHOSEN_SOFTMAX = 2 };

/* The experts of a layer. A matrix of all experts is one expert's panels behind another's. */
typedef struct {
    const uint32_t *router;    /* [experts, hidden], WIDE for any kind of model */
    const float *router_bias;  /* or NULL */
    const float *choice_bias;  /* [experts]: added to the scores for the choice alone; or NULL */
    const uint32_t *gate_up, *down;
    int32_t gate_up_packing, down_packing;        /* see Product */
    const float *gate_up_bias, *down_bias;        /* a value for each packed column, or NULL */
    const uint32_t *shared_gate_up, *shared_down; /* the MLP that all tokens take, or NULL */
    const float *shared_gate; /* [hidden]: that MLP counts times the sigmoid of this gate; or NULL */
} Experts;

enum { NO_RULE = 0, CONVOLUTION = 1, DELTA = 2, MAMBA = 3 };

/* A mixer with a recurrent state, in place of attention; see cpu_recurrent.c. */
typedef struct {
    const float *taps;      /* [conv_width][conv_channels]; the last is the input's own */
    const float *taps_bias; /* [conv_channels], or NULL */
    const float *rate, *dt_bias, *through; /* [rule_heads]; `through` of MAMBA */
    const float *norm; /* of what heads read: [rule_columns] of DELTA, [all heads' rows] of MAMBA */
    int64_t inputs_at, matrices_at; /* bytes of a sequence's states before the layer's */
} Recurrence;

typedef struct {
    const float *attention_norm, *mlp_norm; /* of what a block reads, or NULL */
    const uint32_t *qkv, *output, *gate_up, *down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias; /* see Product, or NULL */
    const float *q_norm, *k_norm;  /* [q_norm_width], [k_norm_width], or NULL */
    const float *sinks; /* [heads]: a logit that takes part in the softmax, without a value; or NULL */
    const float *cos, *sin;        /* [context, head_dim / 2] */
    const float *attention_output_norm, *mlp_output_norm; /* of what is added, or NULL */
    int32_t qkv_packing, output_packing, gate_up_packing, down_packing; /* see Product */
    int32_t window; /* a token sees so many keys, its own the last; 0: all */
    int32_t group, kv_row; /* the layer's KV group, and its place in the group's blocks */
    const Experts *experts; /* instead of the MLP, or NULL */
    const Recurrence *recurrence; /* instead of attention, or NULL; `qkv` is its first map */
    const uint32_t *gate; /* what attention reads counts times the sigmoid of this map; or NULL */
    const float *gate_bias;
    int32_t gate_packing;
} Layer;

typedef struct {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    int32_t kind;    /* of the weights */
    int32_t kv_kind; /* of the KV */
    int32_t gated;   /* SILU or GELU; SQUARED: MLPs without a gate */
    int32_t kv_rows; /* layers of a KV block */
    int32_t q_norm_width, k_norm_width; /* channels that a norm of queries, of keys takes together */
    int32_t centred;  /* norms of the hidden states take the mean off first */
    int32_t parallel; /* the MLP reads what attention reads */
    int32_t growth_context; /* queries grow by 1 + growth * ln(1 + position / growth_context) */
    int32_t head_packing;   /* see Product; where `embeddings` is NULL, NOT_PACKED or of 8 bits */
    float eps, stream_eps;  /* of norms; of those that read the hidden states */
    float scale, cap;       /* of the scores s: scale * s, and if cap > 0 cap * tanh(s / cap) */
    float growth, embed_scale;
    int32_t experts, top_k, expert_width, shared_width; /* channels of an expert; of the shared MLP */
    int32_t expert_gated; /* SILU, GELU or CLAMPED */
    int32_t expert_score; /* SOFTMAX, SIGMOID, or CHOSEN_SOFTMAX: over the chosen logits alone */
    int32_t renormalise;  /* weights of a token's experts sum to expert_scale */
    int32_t expert_groups, expert_groups_kept; /* experts are chosen in the best groups only */
    float expert_scale;
    int32_t rule; /* of the recurrent layers: a kind of `Recurrence` */
    int32_t conv_width, conv_channels, reader_width; /* of w->qkv in recurrent layers */
    int32_t rule_heads, rule_groups; /* states of a layer; heads that give keys, or b and c */
    int32_t rule_rows, rule_columns; /* of a state: keys and values, or channels and states */
    const Layer *layer;
    const void *embeddings; /* [vocab, hidden], fp32 when WIDE, else bf16; NULL: the head's panels */
    const float *norm;
    const uint32_t *head;
    uint32_t *kv; /* [block, kv_row, 2, kv_head, block's K or V] */
} Model;

/* Query tokens [first, end) attend to tiles [tile_first, tile_end) of one block table, which begins
 * at entry `table` of the step's tables. */
typedef struct {
    int32_t first, end, tile_first, tile_end, table;
} Segment;

/* Query tokens [first, end) are computed together, by segments [segment, segment_end) in order. */
typedef struct {
    int32_t first, end, segment, segment_end;
} Bundle;

/* A step as the layers of one KV group see it; each has the same number of bundles. A table's entry
 * behind the window is any block: it may be read, and never counts. `own_keys` [tokens]: which key
 * of its table a token's own is, the last that it sees; its position, but where the table has not
 * all blocks before it. */
typedef struct {
    const int32_t *tables;
    const int64_t *slots;
    const Bundle *bundle;
    const Segment *segment;
    const int32_t *own_keys;
} Place;

typedef struct {
    int32_t tokens, bundles;
    const int32_t *token_ids, *positions;
    const Place *place; /* by KV group */
    float *hidden, *normed, *qkv, *attended, *activated; /* [tokens, ...]; scratch */
    uint32_t *pairs;
    /* Scratch of experts, for `expert_tokens` tokens at a time; rows are tokens times top_k. */
    int32_t expert_tokens;
    int32_t *expert_of, *expert_row, *expert_token; /* [rows] */
    float *expert_weight, *expert_logits;           /* [rows], [tokens, experts] */
    float *expert_rows, *expert_activated;          /* [rows, hidden], [rows, expert_width] */
    uint32_t *expert_pairs;                         /* [rows, the wider of both] */
    float *mixed, *shared, *shared_activated; /* [tokens, hidden], the same, [tokens, shared_width] */
    /* Of recurrent layers: tokens [row_first[i], row_first[i + 1]) are row i, whose sequence has its
     * states in place row_slot[i]. Those from row_drafts[i] are drafts: the states are left before
     * them. */
    int32_t rows;
    const int32_t *row_first, *row_drafts;
    const int64_t *row_slot;
    uint8_t *states;
    int64_t state_bytes;
    float *convolved; /* [tokens, conv_channels] */
    float *gates;     /* [tokens, heads * head_dim], of attention; or NULL */
} Work;

/* Return the channels of what recurrent layers write to w->attended. */
int mixer_width(const Model *m);
/* Compute a mixer with a recurrent state, from w->qkv to w->attended; changes the rows' states. */
void mix_recurrent(Pool *pool, const Model *m, const Work *w, const Recurrence *r);

/* Write to w->mixed what the experts make of x [tokens, hidden], at most w->expert_tokens. */
void mix_experts(Pool *pool, const Model *m, const Work *w, const Experts *e, const float *x,
                 int tokens);
/* Rotate q and k of tokens [first, end) in place and write their k and v into their slots. */
void rope_kv_write(const Model *m, const Work *w, int layer, int first, int end);
/* Compute attention of one bundle's tokens on one KV head, from w->qkv to w->attended. */
void attend(const Model *m, const Work *w, int layer, int bundle, int kv_head);

#endif
