/* Products by AMX tiles: 16 rows by 16 columns, 32 values of k an instruction.
 *
 * A weight panel, a block of keys and a block of values are right-hand tiles as they lie in memory:
 * lines of 16 words of two bf16. A row's sums depend on no other row, and every number of rows takes
 * this path, so the bits of a row do not depend on its batch.
 *
 * The shape of the tile registers is state of a thread. Each function loads the shape it needs; that
 * takes some 20 cycles, a tile instruction 16.
 */
#include "cpu.h"

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS 16
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a line */
    uint8_t rows[16];
} TileShape;

/* Shape the tiles: 0 to 3 are sums, of `rows` rows (0, 1) and `more` rows (2, 3); 4 and 5 are the
 * left-hand sides of `rows` and `more` rows; 6 and 7 are right-hand sides. `pairs`: lines of a
 * right-hand side, and words of a left-hand line. */
INLINE void shape(int rows, int more, int pairs) {
    TileShape s ALIGNED = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        s.bytes[tile] = 64;
        s.rows[tile] = (uint8_t)(tile == 0 || tile == 1 || tile == 4 ? rows : more);
    }
    s.bytes[4] = s.bytes[5] = (uint16_t)(4 * pairs);
    s.rows[6] = s.rows[7] = (uint8_t)pairs;
    _tile_loadconfig(&s);
}

/* 32 columns, up to 32 rows: four sums, so that a load of a tile serves two products. */
static void two_by_two(const uint32_t *a, size_t lda, const uint32_t *b, int rows, int depth,
                       float *out) {
    const uint32_t *b1 = b + (size_t)PANEL * depth / 2, *a1 = a + ROWS * lda;
    shape(ROWS, rows - ROWS, 16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < depth / 2; k += 16) {
        _tile_loadd(6, b + (size_t)k * PANEL, 64);
        _tile_loadd(7, b1 + (size_t)k * PANEL, 64);
        _tile_loadd(4, a + k, lda * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + k, lda * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 256);
    _tile_stored(1, out + 16, 256);
    _tile_stored(2, out + ROWS * 64, 256);
    _tile_stored(3, out + ROWS * 64 + 16, 256);
}

/* Up to 16 rows, 32 or 64 columns: weights are read once, two panels side by side. */
static void one_by_two(const uint32_t *a, size_t lda, const uint32_t *b, int rows, int depth,
                        float *out, int width) {
    const size_t panel = (size_t)PANEL * depth / 2;
    shape(rows, rows, 16);
    for (int column = 0; column < width; column += 32, b += 2 * panel) {
        _tile_zero(0);
        _tile_zero(1);
        for (int k = 0; k < depth / 2; k += 16) {
            const uint32_t *line = b + (size_t)k * PANEL;
            _tile_loadd(4, a + k, lda * 4);
            _tile_loadd(6, line, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, line + panel, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, out + column, 256);
        _tile_stored(1, out + column + 16, 256);
    }
}

void tiles_product(const uint32_t *a, size_t lda, const uint32_t *b, int rows, int depth,
                   float *out, int width) {
    if (rows > ROWS)
        two_by_two(a, lda, b, rows, depth, out);
    else
        one_by_two(a, lda, b, rows, depth, out, width);
}

void tiles_scores(const uint32_t *q, const uint32_t *const *k, int blocks, int rows, int dim,
                  float *scores) {
    const size_t lda = (size_t)dim / 2;
    for (int row = 0; row < rows; row += 2 * ROWS) {
        const int left = rows - row, first = left < ROWS ? left : ROWS;
        const int second = left - ROWS < ROWS ? left - ROWS : ROWS;
        const uint32_t *a = q + row * lda;
        shape(first, second > 0 ? second : first, 16);
        for (int block = 0; block < blocks; block++) {
            float *out = scores + row * TILE + block * BLOCK;
            _tile_zero(0);
            _tile_zero(2);
            for (int d = 0; d < dim / 2; d += 16) {
                _tile_loadd(6, k[block] + d * BLOCK, 64);
                _tile_loadd(4, a + d, lda * 4);
                _tile_dpbf16ps(0, 4, 6);
                if (second > 0) {
                    _tile_loadd(5, a + ROWS * lda + d, lda * 4);
                    _tile_dpbf16ps(2, 5, 6);
                }
            }
            _tile_stored(0, out, TILE * 4);
            if (second > 0) _tile_stored(2, out + ROWS * TILE, TILE * 4);
        }
    }
}

void tiles_values(const uint32_t *p, const uint32_t *const *v, int blocks, int rows, int dim,
                  float *out) {
    for (int row = 0; row < rows; row += ROWS) {
        const int count = rows - row < ROWS ? rows - row : ROWS;
        shape(count, count, BLOCK / 2);
        for (int column = 0; column < dim; column += 2 * BLOCK) {
            float *c = out + row * dim + column;
            _tile_loadd(0, c, dim * 4);
            _tile_loadd(1, c + BLOCK, dim * 4);
            for (int block = 0; block < blocks; block++) {
                _tile_loadd(4, p + row * (TILE / 2) + block * (BLOCK / 2), TILE * 2);
                _tile_loadd(6, v[block] + column, dim * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, v[block] + column + BLOCK, dim * 4);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, c, dim * 4);
            _tile_stored(1, c + BLOCK, dim * 4);
        }
    }
}

static int may_use_tiles(void) {
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static int may_use_tiles(void) { return 0; }
#endif

/* Return the kind that multiplies bf16 weights fastest on this CPU. Asks the kernel for the tile
 * registers, for this process. On CPUs with AMX the vector instruction of DOT is half as fast as an
 * fp32 multiply-add of the same width, so where the kernel refuses tiles, PAIRS is next. */
int bf16_kind(void) {
    if (may_use_tiles()) return TILES;
#if defined(__AMX_BF16__)
    return PAIRS;
#else
    return HAS_DOT ? DOT : PAIRS;
#endif
}
