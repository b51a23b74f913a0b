/* blocks.h once more in double, under names that begin with wide_. */
#pragma push_macro("REAL")
#undef REAL
#define REAL double
#define vec wide_vec
#define View wide_View
#define view wide_view
#define transposed wide_transposed
#define Into wide_Into
#define SET wide_SET
#define ADD wide_ADD
#define SUBTRACT wide_SUBTRACT
#define SET_UPPER wide_SET_UPPER
#define SUBTRACT_UPPER wide_SUBTRACT_UPPER
#define least wide_least
#define add wide_add
#define dot wide_dot
#define transpose wide_transpose
#define pack wide_pack
#define tile_6 wide_tile_6
#define tile_4 wide_tile_4
#define tile_2 wide_tile_2
#define tile_1 wide_tile_1
#define product wide_product
#define cholesky wide_cholesky
#define solve_rows wide_solve_rows
#define solve wide_solve
#define solve_back wide_solve_back
#include "blocks.h"
#undef vec
#undef View
#undef view
#undef transposed
#undef Into
#undef SET
#undef ADD
#undef SUBTRACT
#undef SET_UPPER
#undef SUBTRACT_UPPER
#undef least
#undef add
#undef dot
#undef transpose
#undef pack
#undef tile_6
#undef tile_4
#undef tile_2
#undef tile_1
#undef product
#undef cholesky
#undef solve_rows
#undef solve
#undef solve_back
#pragma pop_macro("REAL")
