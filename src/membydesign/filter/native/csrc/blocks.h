/* Products, a Cholesky factorisation and triangular solves of small row-major matrices that live in a core's cache.
 *
 * An upper triangular R with R'R = G is used throughout: its rows, and all inner loops, run over neighbours.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif
#define EACH(i, n) for (int64_t i = 0; i < (n); i++)
#define SIMD _Pragma("omp simd")
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define TILE_COLUMNS (2 * LANES)
#define SOLVED 16 /* rows of a triangular system that are solved entry by entry; products do the rest */

/* Entries of two vectors in new orders, where the compiler can say so: every second one, and the two in turn. */
#undef SHUFFLES
#undef EVEN
#undef ODD
#undef LOW
#undef HIGH
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SIZE_OF_float 4
#define SIZE_OF_double 8
#define SIZE_OF_(type) SIZE_OF_##type
#define SIZE_OF(type) SIZE_OF_(type)
#define SHUFFLES (VECTOR_BYTES / SIZE_OF(REAL)) /* LANES, for the preprocessor */
#if SHUFFLES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif SHUFFLES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif SHUFFLES == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#else
#define EVEN 0, 2
#define ODD 1, 3
#define LOW 0, 2
#define HIGH 1, 3
#endif
#endif
#endif

/* Room for n numbers; NULL, and their bytes in `missing`, if there is not enough memory. It starts at a cache line: a
 * vector that crosses two of them takes twice as long to load. */
#ifndef ROOM
#define ROOM
#define CACHE_LINE 64
static REAL *room(int64_t n, int64_t *missing) {
  const int64_t most = (PTRDIFF_MAX - CACHE_LINE) / (int64_t)sizeof(REAL);
  const size_t bytes = n > 0 && n <= most ? ((size_t)n * sizeof(REAL) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE : 0;
  REAL *from = bytes ? aligned_alloc(CACHE_LINE, bytes) : NULL;
  if (!from) *missing = n > 0 && n <= most ? n * (int64_t)sizeof(REAL) : PTRDIFF_MAX;
  return from;
}
#endif

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

/* Run `call` for every head, several at once, each thread with room of its own for this many elements; `threads` and
 * `heads` are arguments of the function around it, and `head` and `work` those of the call. The function returns 0, or
 * the bytes that a thread could not allocate; the results are then incomplete. */
#define OVER_HEADS(elements, call)                                                 \
  int64_t missing = 0;                                                             \
  (void)threads; /* unused where there is no OpenMP */                             \
  _Pragma("omp parallel num_threads(least(threads, heads)) reduction(max : missing)") { \
    REAL *work = room(elements, &missing);                                         \
    _Pragma("omp for schedule(dynamic, 1)") EACH(head, heads) if (work) { call; }  \
    free(work);                                                                    \
  }                                                                                \
  return missing;

INLINE void add(REAL *restrict y, REAL c, const REAL *restrict x, int64_t n) { SIMD EACH(i, n) y[i] += c * x[i]; }

INLINE REAL dot(const REAL *restrict x, const REAL *restrict y, int64_t n) {
  REAL total = 0;
  _Pragma("omp simd reduction(+ : total)") EACH(i, n) total += x[i] * y[i];
  return total;
}

/* A view of a matrix: entry (i, j) is at[i * row + j * column]. */
typedef struct {
  const REAL *at;
  int64_t row, column;
} View;

INLINE View view(const REAL *at, int64_t row) { return (View){at, row, 1}; }
INLINE View transposed(const REAL *at, int64_t row) { return (View){at, 1, row}; }

/* How a product enters its result: C = s AB or C += s AB; of all entries, or at least those on and above the diagonal. */
typedef struct {
  REAL sign;
  int added, upper;
} Into;

static const Into SET = {1, 0, 0}, ADD = {1, 1, 0}, SUBTRACT = {-1, 1, 0}, SET_UPPER = {1, 0, 1},
                  SUBTRACT_UPPER = {-1, 1, 1};

/* LANES rows of LANES numbers that lie `ld` apart, transposed, into rows that lie `pitch` apart. */
INLINE void transpose(REAL *restrict panel, const REAL *from, int64_t ld, int64_t pitch) {
#ifdef SHUFFLES
  vec x[SHUFFLES], y[SHUFFLES];
  _Pragma("GCC unroll 16") EACH(i, LANES) x[i] = *(const vec *)(from + i * ld);
  _Pragma("GCC unroll 4") for (int64_t stage = 1; stage < LANES; stage *= 2) { /* rows far apart become neighbours */
    _Pragma("GCC unroll 8") EACH(i, LANES / 2) {
      y[2 * i] = __builtin_shufflevector(x[i], x[i + LANES / 2], LOW);
      y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + LANES / 2], HIGH);
    }
    _Pragma("GCC unroll 16") EACH(i, LANES) x[i] = y[i];
  }
  _Pragma("GCC unroll 16") EACH(i, LANES) *(vec *)(panel + i * pitch) = x[i];
#else
  EACH(i, LANES) EACH(l, LANES) panel[l * pitch + i] = from[i * ld + l];
#endif
}

/* Columns j, j+1, … of B side by side, filled up with zeros. */
static void pack(REAL *restrict panel, View B, int64_t j, int64_t k, int64_t columns) {
  const REAL *from = B.at + j * B.column;
  if (columns < TILE_COLUMNS) memset(panel, 0, k * TILE_COLUMNS * sizeof(REAL));
  if (B.column == 1 && columns == TILE_COLUMNS) { /* without a call for each row */
    EACH(l, k) _Pragma("GCC unroll 2") EACH(h, 2)
      *(vec *)(panel + l * TILE_COLUMNS + h * LANES) = *(const vec *)(from + l * B.row + h * LANES);
    return;
  }
  if (B.column == 1) {
    EACH(l, k) memcpy(panel + l * TILE_COLUMNS, from + l * B.row, columns * sizeof(REAL));
    return;
  }
  const int64_t wide = B.row == 1 ? columns / LANES * LANES : 0, deep = k / LANES * LANES;
  for (int64_t l = 0; l < deep; l += LANES)
    for (int64_t c = 0; c < wide; c += LANES)
      transpose(panel + l * TILE_COLUMNS + c, from + l + c * B.column, B.column, TILE_COLUMNS);
  for (int64_t l = wide ? deep : 0; l < k; l++)
    EACH(c, wide) panel[l * TILE_COLUMNS + c] = from[l * B.row + c * B.column];
  EACH(l, k) for (int64_t c = wide; c < columns; c++) panel[l * TILE_COLUMNS + c] = from[l * B.row + c * B.column];
}

/* Rows of C, from columns of B in rows of the panel, which lie `pitch` apart. */
#define TILE(rows)                                                                                        \
  static void tile_##rows(const REAL *restrict a, int64_t row, int64_t column, const REAL *restrict panel, \
                          int64_t pitch, int64_t k, REAL *restrict C, int64_t ld, Into into, int64_t columns) { \
    vec x[rows][2];                                                                                       \
    _Pragma("GCC unroll 6") EACH(i, rows) x[i][0] = x[i][1] = (vec){0};                                   \
    EACH(l, k) {                                                                                          \
      const vec b0 = *(const vec *)(panel + l * pitch), b1 = *(const vec *)(panel + l * pitch + LANES);   \
      const REAL *at = a + l * column;                                                                    \
      _Pragma("GCC unroll 6") EACH(i, rows) {                                                             \
        x[i][0] += at[i * row] * b0;                                                                      \
        x[i][1] += at[i * row] * b1;                                                                      \
      }                                                                                                   \
    }                                                                                                     \
    if (columns == TILE_COLUMNS) {                                                                        \
      _Pragma("GCC unroll 6") EACH(i, rows) _Pragma("GCC unroll 2") EACH(h, 2) {                          \
        vec *c = (vec *)(C + i * ld + h * LANES);                                                         \
        *c = into.added ? *c + into.sign * x[i][h] : into.sign * x[i][h];                                 \
      }                                                                                                   \
    } else {                                                                                              \
      EACH(i, rows) EACH(j, columns) {                                                                    \
        REAL z = into.sign * x[i][j / LANES][j % LANES];                                                  \
        C[i * ld + j] = into.added ? C[i * ld + j] + z : z;                                               \
      }                                                                                                   \
    }                                                                                                     \
  }
TILE(6)
TILE(4)
TILE(2)
TILE(1)

#define NEAR 4096 /* numbers that rows of B may span to be read where they are, each time, without evicting each other */

/* C [m,n] = or += or -= A [m,k] B [k,n]; `panel` has room for k * TILE_COLUMNS. */
static void product(int64_t m, int64_t n, int64_t k, View A, View B, REAL *C, int64_t ld, Into into, REAL *panel) {
  for (int64_t j = 0; j < n; j += TILE_COLUMNS) {
    int64_t columns = least(TILE_COLUMNS, n - j), rows = into.upper ? least(m, j + columns) : m;
    const int in_place = B.column == 1 && columns == TILE_COLUMNS && k * B.row <= NEAR;
    const REAL *b = in_place ? B.at + j : panel;
    const int64_t pitch = in_place ? B.row : TILE_COLUMNS;
    if (!in_place) pack(panel, B, j, k, columns);
    for (int64_t i = 0; i < rows;) {
      const REAL *a = A.at + i * A.row;
      REAL *c = C + i * ld + j;
#define CALL(r) (tile_##r(a, A.row, A.column, b, pitch, k, c, ld, into, columns), r)
      int64_t left = rows - i;
      i += left >= 6 ? CALL(6) : left >= 4 ? CALL(4) : left >= 2 ? CALL(2) : CALL(1);
#undef CALL
    }
  }
}

/* R'R = G in place, upper triangle. Returns the first row whose pivot is not positive (which is taken as 1), or -1;
 * what is not a number stays so. */
static int64_t cholesky(REAL *G, int64_t n, REAL *panel) {
  int64_t failed = -1;
  for (int64_t start = 0; start < n; start += SOLVED) {
    int64_t end = least(start + SOLVED, n);
    if (start)
      product(end - start, n - start, start, transposed(G + start, n), view(G + start, n), G + start * n + start, n,
              SUBTRACT_UPPER, panel);
    for (int64_t i = start; i < end; i++) {
      REAL *row = G + i * n;
      for (int64_t l = start; l < i; l++) add(row + i, -G[l * n + i], G + l * n + i, n - i);
      if (row[i] <= 0) {
        if (failed < 0) failed = i;
        row[i] = 1;
      }
      REAL scale = 1 / (REAL)sqrt(row[i]);
      SIMD for (int64_t j = i; j < n; j++) row[j] *= scale;
    }
  }
  return failed;
}

/* Rows first … last-1 of a system in strips of columns that stay in registers; `up` walks from the last row. */
#define STRIP 4
INLINE void solve_rows(const REAL *R, int64_t n, REAL *Y, int64_t width, int64_t ld, int64_t start, int64_t end, int up) {
  for (int64_t j = 0; j < width; j += STRIP * LANES) {
    int64_t columns = least(STRIP * LANES, width - j);
    EACH(step, end - start) {
      int64_t i = up ? end - 1 - step : start + step;
      REAL *row = Y + i * ld + j, scale = 1 / R[i * n + i];
      int64_t first = up ? i + 1 : start, last = up ? end : i;
      if (columns == STRIP * LANES) {
        vec x[STRIP];
        _Pragma("GCC unroll 4") EACH(h, STRIP) x[h] = ((vec *)row)[h];
        for (int64_t l = first; l < last; l++) {
          const REAL c = up ? R[i * n + l] : R[l * n + i];
          const vec *y = (const vec *)(Y + l * ld + j);
          _Pragma("GCC unroll 4") EACH(h, STRIP) x[h] -= c * y[h];
        }
        _Pragma("GCC unroll 4") EACH(h, STRIP) ((vec *)row)[h] = x[h] * scale;
      } else {
        for (int64_t l = first; l < last; l++) add(row, -(up ? R[i * n + l] : R[l * n + i]), Y + l * ld + j, columns);
        EACH(h, columns) row[h] *= scale;
      }
    }
  }
}

/* Y [n,width] = R'^-1 Y, from the first row on. */
static void solve(const REAL *R, int64_t n, REAL *Y, int64_t width, int64_t ld, REAL *panel) {
  for (int64_t start = 0; start < n; start += SOLVED) {
    int64_t end = least(start + SOLVED, n);
    if (start)
      product(end - start, width, start, transposed(R + start, n), view(Y, ld), Y + start * ld, ld, SUBTRACT, panel);
    solve_rows(R, n, Y, width, ld, start, end, 0);
  }
}

/* Y [n,width] = R^-1 Y, from the last row on. */
static void solve_back(const REAL *R, int64_t n, REAL *Y, int64_t width, int64_t ld, REAL *panel) {
  for (int64_t start = (n - 1) / SOLVED * SOLVED; start >= 0; start -= SOLVED) {
    int64_t end = least(start + SOLVED, n);
    if (end < n)
      product(end - start, width, n - end, view(R + start * n + end, n), view(Y + end * ld, ld), Y + start * ld, ld,
              SUBTRACT, panel);
    solve_rows(R, n, Y, width, ld, start, end, 1);
  }
}
