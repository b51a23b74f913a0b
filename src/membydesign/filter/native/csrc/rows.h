/* A few long rows: their products with a vector, their sums, and Cholesky factors of their small Gram matrices.
 * Include it after blocks.h. Small matrices have rows of `padded(n)` numbers; what pads them stays finite. */
#ifndef ROWS_H
#define ROWS_H

INLINE int64_t padded(int64_t n) {
  const int64_t width = LANES > 4 ? LANES : 4;
  return (n + width - 1) / width * width;
}

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

/* R'R = A in place, upper triangle; a pivot that is not positive is taken as 1. */
static void small_cholesky(REAL *A, int64_t n, int64_t ld) {
  EACH(i, n) {
    REAL *row = A + i * ld;
    const REAL scale = 1 / (REAL)sqrt(row[i] > 0 ? row[i] : 1);
    for (int64_t j = 0; j < ld; j += LANES) *(vec *)(row + j) *= scale;
    for (int64_t l = i + 1; l < n; l++) small_subtract(A + l * ld, row[l], row, ld);
  }
}

/* x = R^-1 R'^-1 x; x has room for ld numbers. */
static void small_solve(const REAL *R, int64_t n, int64_t ld, REAL *x) {
  EACH(i, n) {
    const REAL y = x[i] / R[i * ld + i];
    for (int64_t j = i + 1; j < n; j++) x[j] -= y * R[i * ld + j];
    x[i] = y;
  }
  for (int64_t i = n - 1; i >= 0; i--) {
    REAL y = x[i];
    for (int64_t j = i + 1; j < n; j++) y -= R[i * ld + j] * x[j];
    x[i] = y / R[i * ld + i];
  }
}

/* The row with the largest entry on the diagonal of (R'R)^-1; Y has room for n ld numbers. */
static int64_t largest_of_inverse(const REAL *R, int64_t n, int64_t ld, REAL *Y) {
  REAL *total = Y + n * ld;
  memset(Y, 0, (n + 1) * ld * sizeof(REAL));
  EACH(i, n) {
    REAL *row = Y + i * ld;
    const REAL scale = 1 / R[i * ld + i];
    row[i] = 1;
    EACH(l, i) small_subtract(row, R[l * ld + i], Y + l * ld, ld);
    for (int64_t j = 0; j < ld; j += LANES) {
      *(vec *)(row + j) *= scale;
      *(vec *)(total + j) += *(vec *)(row + j) * *(vec *)(row + j);
    }
  }
  int64_t best = 0;
  EACH(i, n) if (total[i] > total[best]) best = i;
  return best;
}
#endif
