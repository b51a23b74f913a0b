/* The passes of kalman_token.c over P and M: a pending write is carried out, memory drifts and is looked at, all while each
 * entry is in a register once. Include it after blocks.h. */
#define ROW4(x, stride) x, x + stride, x + 2 * stride, x + 3 * stride

/* to = A (from - c u') A' without rotation, a row of entries each; look += k' to. Four rows share the traffic of look. */
INLINE void sweep_P(REAL *to, const REAL *from, const REAL *restrict c, const REAL *restrict u, const REAL *restrict a,
                    const REAL *restrict k, REAL *restrict look, int64_t D) {
  int64_t i = 0;
  for (; i + 4 <= D; i += 4) {
    const REAL *x[4] = {ROW4(from + i * D, D)};
    REAL *y[4] = {ROW4(to + i * D, D)};
    const REAL c0 = c[i], c1 = c[i + 1], c2 = c[i + 2], c3 = c[i + 3];
    const REAL a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];
    const REAL k0 = k[i], k1 = k[i + 1], k2 = k[i + 2], k3 = k[i + 3];
    SIMD EACH(j, D) {
      REAL w = a[j], v = u[j];
      REAL z0 = (x[0][j] - c0 * v) * (a0 * w), z1 = (x[1][j] - c1 * v) * (a1 * w);
      REAL z2 = (x[2][j] - c2 * v) * (a2 * w), z3 = (x[3][j] - c3 * v) * (a3 * w);
      y[0][j] = z0, y[1][j] = z1, y[2][j] = z2, y[3][j] = z3;
      look[j] += (k0 * z0 + k1 * z1) + (k2 * z2 + k3 * z3);
    }
  }
  for (; i < D; i++) {
    const REAL *x = from + i * D;
    REAL *y = to + i * D;
    SIMD EACH(j, D) {
      REAL z = (x[j] - c[i] * u[j]) * (a[i] * a[j]);
      y[j] = z;
      look[j] += k[i] * z;
    }
  }
}

/* The same for damped rotations: two rows of a pair, and in each of them the two halves of columns. */
INLINE void turn_P(REAL *to, const REAL *from, const REAL *restrict c, const REAL *restrict u, const REAL *restrict cos,
                   const REAL *restrict sin, const REAL *restrict k, REAL *restrict look, int64_t D) {
  int64_t half = D / 2;
  const REAL *restrict v = u + half;
  REAL *restrict look_v = look + half;
  EACH(i, half) {
    const REAL *x = from + i * D, *y = from + (i + half) * D;
    REAL *p = to + i * D, *q = to + (i + half) * D;
    const REAL c0 = c[i], c1 = c[i + half], k0 = k[i], k1 = k[i + half], r = cos[i], s = sin[i];
    SIMD EACH(j, half) {
      REAL x0 = x[j] - c0 * u[j], x1 = x[j + half] - c0 * v[j];
      REAL y0 = y[j] - c1 * u[j], y1 = y[j + half] - c1 * v[j];
      REAL p0 = r * x0 - s * y0, p1 = r * x1 - s * y1, q0 = s * x0 + r * y0, q1 = s * x1 + r * y1;
      x0 = cos[j] * p0 - sin[j] * p1, x1 = sin[j] * p0 + cos[j] * p1;
      y0 = cos[j] * q0 - sin[j] * q1, y1 = sin[j] * q0 + cos[j] * q1;
      p[j] = x0, p[j + half] = x1, q[j] = y0, q[j + half] = y1;
      look[j] += k0 * x0 + k1 * y0;
      look_v[j] += k0 * x1 + k1 * y1;
    }
  }
}

#define PAIR 2 /* vectors of columns whose sums stay in registers while all rows pass */
#define COLUMNS(h) _Pragma("GCC unroll 2") for (int64_t h = 0; h < W; h++)

/* W vectors of columns, from column j on, of `sweep_M`. */
INLINE void sweep_M_vectors(int W, REAL *to, const REAL *from, const REAL *restrict c, const REAL *restrict e,
                            const REAL *restrict q, REAL *restrict o, const REAL *restrict a, const REAL *restrict k,
                            REAL *restrict p, int64_t j, int64_t D, int64_t m) {
  vec read[2][PAIR] = {{{0}}}, predicted[2][PAIR] = {{{0}}}, v[PAIR];
  COLUMNS(h) v[h] = *(const vec *)(e + j + h * LANES);
#define SWEEP_ROW(i, r)                                                                       \
  COLUMNS(h) {                                                                                \
    vec z = *(const vec *)(from + (i) * m + j + h * LANES) + c[i] * v[h];                     \
    read[r][h] += q[i] * z;                                                                   \
    z *= a[i];                                                                                \
    *(vec *)(to + (i) * m + j + h * LANES) = z;                                               \
    predicted[r][h] += k[i] * z;                                                              \
  }
  int64_t i = 0;
  for (; i + 2 <= D; i += 2) _Pragma("GCC unroll 2") EACH(r, 2) SWEEP_ROW(i + r, r)
  if (i < D) SWEEP_ROW(i, 0)
#undef SWEEP_ROW
  COLUMNS(h) {
    *(vec *)(o + j + h * LANES) = read[0][h] + read[1][h];
    *(vec *)(p + j + h * LANES) = predicted[0][h] + predicted[1][h];
  }
}

/* M (after the pending write) is read along q; then to = A M, and p = to' k. */
INLINE void sweep_M(REAL *to, const REAL *from, const REAL *restrict c, const REAL *restrict e, const REAL *restrict q,
                    REAL *restrict o, const REAL *restrict a, const REAL *restrict k, REAL *restrict p, int64_t D,
                    int64_t m) {
  int64_t first = 0;
  for (; first + PAIR * LANES <= m; first += PAIR * LANES) sweep_M_vectors(PAIR, to, from, c, e, q, o, a, k, p, first, D, m);
  for (; first + LANES <= m; first += LANES) sweep_M_vectors(1, to, from, c, e, q, o, a, k, p, first, D, m);
  EACH(i, first < m ? D : 0) {
    const REAL *x = from + i * m;
    REAL *y = to + i * m;
    SIMD for (int64_t j = first; j < m; j++) {
      REAL z = x[j] + c[i] * e[j];
      o[j] += q[i] * z;
      z *= a[i];
      y[j] = z;
      p[j] += k[i] * z;
    }
  }
}

INLINE void turn_M(REAL *to, const REAL *from, const REAL *restrict c, const REAL *restrict e, const REAL *restrict q,
                   REAL *restrict o, const REAL *restrict cos, const REAL *restrict sin, const REAL *restrict k,
                   REAL *restrict p, int64_t D, int64_t m) {
  int64_t half = D / 2;
  EACH(i, half) {
    const REAL *x = from + i * m, *y = from + (i + half) * m;
    REAL *f = to + i * m, *g = to + (i + half) * m;
    const REAL c0 = c[i], c1 = c[i + half], q0 = q[i], q1 = q[i + half], k0 = k[i], k1 = k[i + half];
    const REAL r = cos[i], s = sin[i];
    SIMD EACH(j, m) {
      REAL z0 = x[j] + c0 * e[j], z1 = y[j] + c1 * e[j];
      o[j] += q0 * z0 + q1 * z1;
      REAL t0 = r * z0 - s * z1, t1 = s * z0 + r * z1;
      f[j] = t0, g[j] = t1;
      p[j] += k0 * t0 + k1 * t1;
    }
  }
}
