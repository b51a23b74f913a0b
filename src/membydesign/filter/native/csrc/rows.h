/* A few long rows: their products with a vector, their sums, and factors of their small Gram matrices.
 * Include it after blocks.h. Small matrices have rows of `padded(n)` numbers; what pads them stays finite. */
#ifndef ROWS_H
#define ROWS_H

INLINE int64_t padded(int64_t n) {
  const int64_t width = LANES > 4 ? LANES : 4;
  return (n + width - 1) / width * width;
}

INLINE REAL least_of(REAL x, REAL y) { return x < y ? x : y; }

INLINE REAL lanes_sum(vec x) {
  REAL parts[LANES];
  memcpy(parts, &x, sizeof(vec));
  _Pragma("GCC unroll 4") for (int64_t width = LANES / 2; width; width /= 2)
    _Pragma("GCC unroll 8") EACH(l, width) parts[l] += parts[l + width];
  return parts[0];
}

/* to_i = F_i x, for n rows of D numbers. */
static void rows_times(int64_t n, int64_t D, const REAL *F, const REAL *x, REAL *to) {
  int64_t whole = D / LANES * LANES, i = 0;
  for (; i + 4 <= n; i += 4) {
    vec s[4] = {{0}, {0}, {0}, {0}};
    const REAL *f = F + i * D;
    for (int64_t j = 0; j < whole; j += LANES) {
      const vec y = *(const vec *)(x + j);
      _Pragma("GCC unroll 4") EACH(h, 4) s[h] += y * *(const vec *)(f + h * D + j);
    }
    _Pragma("GCC unroll 4") EACH(h, 4) to[i + h] = lanes_sum(s[h]);
    for (int64_t j = whole; j < D; j++) EACH(h, 4) to[i + h] += f[h * D + j] * x[j];
  }
  for (; i < n; i++) to[i] = dot(F + i * D, x, D);
}

/* G = F F', at least on and above the diagonal; room for 3 more rows follows F [n,D] and G [n,ld]. */
static void rows_gram(int64_t n, int64_t D, const REAL *F, REAL *G, int64_t ld) {
  int64_t whole = D / LANES * LANES;
  for (int64_t i = 0; i < n; i += 2) for (int64_t j = i / 4 * 4; j < n; j += 4) {
    vec s[2][4] = {{{0}, {0}, {0}, {0}}, {{0}, {0}, {0}, {0}}};
    const REAL *x = F + i * D, *y = F + j * D;
    for (int64_t l = 0; l < whole; l += LANES) {
      const vec x0 = *(const vec *)(x + l), x1 = *(const vec *)(x + D + l);
      _Pragma("GCC unroll 4") EACH(h, 4) {
        const vec yh = *(const vec *)(y + h * D + l);
        s[0][h] += x0 * yh;
        s[1][h] += x1 * yh;
      }
    }
    _Pragma("GCC unroll 2") EACH(r, 2) {
      REAL *to = G + (i + r) * ld + j;
      _Pragma("GCC unroll 4") EACH(h, 4) to[h] = lanes_sum(s[r][h]);
      for (int64_t l = whole; l < D; l++) EACH(h, 4) to[h] += x[r * D + l] * y[h * D + l];
    }
  }
}

/* G = F F', all of it; what pads it is zero. */
static void whole_gram(int64_t n, int64_t D, const REAL *F, REAL *G, int64_t ld) {
  rows_gram(n, D, F, G, ld);
  EACH(i, n) {
    EACH(j, i) G[i * ld + j] = G[j * ld + i];
    memset(G + i * ld + n, 0, (ld - n) * sizeof(REAL));
  }
}

/* to += sum of c_i F_i. */
static void rows_sum(int64_t n, int64_t D, const REAL *c, const REAL *F, REAL *to) {
  int64_t j = 0;
  for (; j + 4 * LANES <= D; j += 4 * LANES) {
    vec s[4];
    _Pragma("GCC unroll 4") EACH(h, 4) s[h] = *(const vec *)(to + j + h * LANES);
    EACH(i, n) {
      const REAL ci = c[i];
      _Pragma("GCC unroll 4") EACH(h, 4) s[h] += ci * *(const vec *)(F + i * D + j + h * LANES);
    }
    _Pragma("GCC unroll 4") EACH(h, 4) *(vec *)(to + j + h * LANES) = s[h];
  }
  if (j < D) EACH(i, n) add(to + j, c[i], F + i * D + j, D - j);
}

/* y -= c x, for rows of a small matrix. */
INLINE void small_subtract(REAL *y, REAL c, const REAL *x, int64_t ld) {
  for (int64_t j = 0; j < ld; j += LANES) *(vec *)(y + j) -= c * *(const vec *)(x + j);
}

/* Eliminate the first R rows of a symmetric A, A = LDL', from each other and from the row below them, if n = R + 1:
 * inverse = 1/D, Y = L^-1 (without its last column), and `border` the last row of LD, [R]. A pivot that is not positive
 * is taken as 1. Returns the smallest pivot. */
static REAL small_eliminate(REAL *A, REAL *Y, REAL *inverse, REAL *border, int64_t R, int64_t n, int64_t ld) {
  REAL smallest = 1;
  memset(Y, 0, n * ld * sizeof(REAL));
  EACH(i, R) Y[i * ld + i] = 1;
  EACH(i, R) {
    const REAL *row = A + i * ld, *from = Y + i * ld, pivot = row[i], scale = inverse[i] = 1 / (pivot > 0 ? pivot : 1);
    smallest = least_of(smallest, pivot);
    for (int64_t l = i + 1; l < n; l++) {
      REAL *to = A + l * ld, *y = Y + l * ld;
      const REAL c = scale * (l < R ? row[l] : to[i]);
      if (l >= R) border[i] = to[i];
      for (int64_t j = i / LANES * LANES; j < ld; j += LANES) *(vec *)(to + j) -= c * *(const vec *)(row + j);
      for (int64_t j = 0; j <= i; j += LANES) *(vec *)(y + j) -= c * *(const vec *)(from + j);
    }
  }
  return smallest;
}
#endif
