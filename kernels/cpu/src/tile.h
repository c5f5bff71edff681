// Tile registers: eight matrices of up to 16 rows of 64 bytes, and the products between them.
//
// REMORA_TILES = 1 takes Intel's AMX instructions, 2 an emulation with the same results bit for bit,
// so that code which uses tiles is compiled and tested on every machine. Without either, HAS_TILES is
// false and the rest is absent. A product costs the same for 1 row as for 16.
//
// Knows nothing of the layout of weights or activations.
#pragma once

#include "simd.h"

#if REMORA_TILES == 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace remora {

#if REMORA_TILES
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE_SIDE = 16;         // rows of a tile, and 32-bit columns of a tile of sums
constexpr int TILE_ROW_BYTES = 64;
constexpr int TILE_BYTES = TILE_SIDE * TILE_ROW_BYTES;

// Registers: sums, rows of the left operand, columns of the right one.
constexpr int SUMS = 0, LEFT = 4, RIGHT = 6;

#if REMORA_TILES

// Pairs of bf16 numbers: the first or second of each, as floats.
INLINE vf evens(vi pairs) { return (vf)(pairs << 16); }
INLINE vf odds(vi pairs) { return (vf)(pairs & splat((int32_t)0xffff0000)); }

// The kernel's description of tile registers (LDTILECFG).
struct alignas(64) TilePalette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Bytes along k of the operands, 16 to 64; rows of left operands and sums.
  TilePalette(int depth, int num_rows) {
    for (int tile = 0; tile < 8; tile++) {
      row_bytes[tile] = tile == LEFT || tile == LEFT + 1 ? depth : TILE_ROW_BYTES;
      rows[tile] = tile >= RIGHT ? depth / 4 : num_rows;
    }
  }
};

#if REMORA_TILES == 1

// Ask the kernel to keep tile registers of this process's threads. Later threads inherit the answer.
inline bool may_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Inline assembly: compilers' intrinsics declare only a part of the palette as read, and take
// registers as literals only.
template <int TILE>
INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int SUM, int A, int B>
INLINE void dot_tiles_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

template <int SUM, int A, int B>
INLINE void dot_tiles_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

template <int SUM, int A, int B>
INLINE void dot_tiles_u8s8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

INLINE void configure_tiles(const TilePalette& palette) {
  asm volatile("ldtilecfg %0" ::"m"(palette) : "memory");
}

INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

#else

inline bool may_use_tiles() { return true; }

// Compiled once and called by number: an emulation in every place of use takes minutes to compile.
#define APART inline __attribute__((noinline))

struct EmulatedTiles {
  alignas(64) char data[8][TILE_SIDE][TILE_ROW_BYTES];
  TilePalette palette{TILE_ROW_BYTES, TILE_SIDE};
};
inline thread_local EmulatedTiles emulated;

APART void zero_tile_of(int tile) { memset(emulated.data[tile], 0, TILE_BYTES); }

APART void load_tile_of(int tile, const void* from, int64_t stride) {
  zero_tile_of(tile);
  for (int row = 0; row < emulated.palette.rows[tile]; row++)
    memcpy(emulated.data[tile][row], (const char*)from + row * stride,
           emulated.palette.row_bytes[tile]);
}

APART void store_tile_of(int tile, void* to, int64_t stride) {
  for (int row = 0; row < emulated.palette.rows[tile]; row++)
    memcpy((char*)to + row * stride, emulated.data[tile][row], emulated.palette.row_bytes[tile]);
}

// Numbers below the smallest normal one are taken and given as 0.
INLINE vf flushed(vf x) {
  const vi is_small = absolute(x) < 1.17549435e-38f;
  return bits_to_float(float_to_bits(x) & (~is_small | splat(INT32_MIN)));
}

INLINE vf fused(vf a, vf b, vf c) {
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return flushed(out);
}

// sum += (products of the even k, summed in ascending order) + (those of the odd k)
APART void dot_tiles_bf16_of(int sum, int left, int right) {
  auto& tiles = emulated.data;
  for (int row = 0; row < emulated.palette.rows[sum]; row++) {
    vf even = {}, odd = {};
    for (int pair = 0; pair < emulated.palette.rows[right]; pair++) {
      const vi a = splat(load<int32_t>(tiles[left][row] + pair * 4));
      const vi b = load<vi>(tiles[right][pair]);
      even = fused(flushed(evens(a)), flushed(evens(b)), even);
      odd = fused(flushed(odds(a)), flushed(odds(b)), odd);
    }
    store(tiles[sum][row], flushed(flushed(load<vf>(tiles[sum][row])) + flushed(even + odd)));
  }
}

// sum += the products of bytes, those of the right operand signed
template <class Left>
APART void dot_tiles_of_bytes(int sum, int left, int right) {
  auto& tiles = emulated.data;
  for (int row = 0; row < emulated.palette.rows[sum]; row++) {
    vi total = load<vi>(tiles[sum][row]);
    for (int quad = 0; quad < emulated.palette.rows[right]; quad++)
      for (int at = 0; at < 4; at++) {
        const vi b = load<vi>(tiles[right][quad]) << (24 - 8 * at) >> 24;
        total += b * (int32_t)(Left)tiles[left][row][quad * 4 + at];
      }
    store(tiles[sum][row], total);
  }
}

#undef APART

template <int TILE>
INLINE void zero_tile() {
  zero_tile_of(TILE);
}

template <int TILE>
INLINE void load_tile(const void* from, int64_t stride) {
  load_tile_of(TILE, from, stride);
}

template <int TILE>
INLINE void store_tile(void* to, int64_t stride) {
  store_tile_of(TILE, to, stride);
}

template <int SUM, int A, int B>
INLINE void dot_tiles_bf16() {
  dot_tiles_bf16_of(SUM, A, B);
}

template <int SUM, int A, int B>
INLINE void dot_tiles_s8() {
  dot_tiles_of_bytes<int8_t>(SUM, A, B);
}

template <int SUM, int A, int B>
INLINE void dot_tiles_u8s8() {
  dot_tiles_of_bytes<uint8_t>(SUM, A, B);
}

inline void configure_tiles(const TilePalette& palette) { emulated.palette = palette; }
inline void release_tiles() {}

#endif

// sums += one or two adjacent tiles of rows times two adjacent tiles of columns
template <int BLOCKS>
INLINE void dot_blocks(const char* x, const char* w) {
  load_tile<LEFT>(x, TILE_ROW_BYTES);
  load_tile<RIGHT>(w, TILE_ROW_BYTES);
  dot_tiles_bf16<SUMS, LEFT, RIGHT>();
  load_tile<RIGHT + 1>(w + TILE_BYTES, TILE_ROW_BYTES);
  dot_tiles_bf16<SUMS + 1, LEFT, RIGHT + 1>();
  if constexpr (BLOCKS == 2) {
    load_tile<LEFT + 1>(x + TILE_BYTES, TILE_ROW_BYTES);
    dot_tiles_bf16<SUMS + 2, LEFT + 1, RIGHT>();
    dot_tiles_bf16<SUMS + 3, LEFT + 1, RIGHT + 1>();
  }
}

// Vector instructions fuse and flush like tiles while this lives: few rows are multiplied by vectors
// with the same bits. What they compute must be in a function that is not inlined here.
class VectorsLikeTiles {
 public:
#if defined(__FMA__)
  static constexpr bool EXIST = true;
  VectorsLikeTiles() : before_(_mm_getcsr()) { set(before_ | FLUSH_RESULTS | FLUSH_OPERANDS); }
  ~VectorsLikeTiles() { set(before_); }

 private:
  static constexpr unsigned FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x40;
  static void set(unsigned control) {
    asm volatile("" ::: "memory");
    _mm_setcsr(control);
    asm volatile("" ::: "memory");
  }
  const unsigned before_;
#else
  static constexpr bool EXIST = false;
#endif
};

// Tile registers are configured while this lives. A thread that sleeps holds none: the kernel would
// save 8 KB at every switch.
class TileUse {
 public:
  explicit TileUse(const TilePalette& palette) { configure_tiles(palette); }
  ~TileUse() { release_tiles(); }
  TileUse(const TileUse&) = delete;
};

#endif

}  // namespace remora
