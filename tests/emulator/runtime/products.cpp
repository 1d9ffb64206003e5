// Tensor cores. Products are exact; sums are taken in double precision and rounded once. (A GPU cuts low
// bits off the terms of a sum.)
#include "../headers/numbers.h"
#include "state.h"

namespace device {

namespace {

constexpr int DEPTH = 16;         // terms that a product adds up
constexpr int ROW_BYTES = 128;    // of a box in shared memory
constexpr int MAX_COLUMNS = 256;

double decode(Number number, uint16_t bits) { return number == Number::BF16 ? from_bf16(bits) : from_fp16(bits); }
uint64_t swizzled(uint64_t at) { return at ^ (at >> 7 & 7) << 4; }

// Element `e` of a word
double element(Number number, uint32_t word, int e) {
  if (number == Number::TF32) return bits_as<float>(word & ~0x1fffu);
  return decode(number, (uint16_t)(word >> 16 * e));
}

// c[16][columns] = a[16][depth] times b[depth][columns]
void multiply_tile(double* c, const double* a, const double* b, int depth, int columns) {
  for (int i = 0; i < 16 * columns; ++i) c[i] = 0;
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < depth; ++k) {
      const double factor = a[r * depth + k];
      double* row = c + r * columns;
      const double* other = b + k * columns;
      for (int n = 0; n < columns; ++n) row[n] += factor * other[n];
    }
}

// --- mma.sync -------------------------------------------------------------------------------------------

struct Matrices {
  char* row;
  uint32_t* r;
};
// Four matrices of 8 x 8 16-bit numbers. Lane l brings the address of row l % 8 of matrix l / 8, and has of each matrix
// the word of four bytes at row l / 4, column l % 4.
template <bool STORE>
void move_matrices(void** all, unsigned, Place at) {
  for (int lane = 0; lane < 32; ++lane) {
    const char* row = ((Matrices*)all[lane])->row;
    if ((uint64_t)row % 16) fail(at, "a row of a matrix: expected a multiple of 16 bytes");
    shared_range(my_block(), row - current->shared, 16, at);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix) {
      char* word = ((Matrices*)all[8 * matrix + lane / 4])->row + lane % 4 * 4;
      uint32_t& r = ((Matrices*)all[lane])->r[matrix];
      if (STORE) memcpy(word, &r, 4);
      else memcpy(&r, word, 4);
    }
}

struct Fragments {
  float** d;
  const uint32_t* a;
  uint32_t b[2];
};
template <Number NUMBER>
void multiply_fragments(void** all, unsigned, Place) {
  constexpr int WORD = NUMBER == Number::TF32 ? 1 : 2, K = 8 * WORD;  // elements of a word; terms
  double a[16 * K], b[K * 8], c[16 * 8];
  for (int lane = 0; lane < 32; ++lane) {
    const Fragments& f = *(const Fragments*)all[lane];
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half)
      for (int e = 0; e < WORD; ++e) {
        const int k = (4 * half + t) * WORD + e;
        a[g * K + k] = element(NUMBER, f.a[2 * half], e);
        a[(g + 8) * K + k] = element(NUMBER, f.a[2 * half + 1], e);
        b[k * 8 + g] = element(NUMBER, f.b[half], e);
      }
  }
  multiply_tile(c, a, b, K, 8);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      float& d = *((const Fragments*)all[lane])->d[i];
      d = (float)(d + c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2]);
    }
}

// --- wgmma ----------------------------------------------------------------------------------------------

uint64_t address(uint32_t descriptor) { return (uint64_t)(descriptor & 0x3fff) << 4; }

struct Operand {
  const char* shared;
  Number number;
  double at(uint64_t offset) const {
    uint16_t bits;
    memcpy(&bits, shared + swizzled(offset), 2);
    return decode(number, bits);
  }
};

void carry_out(const WarpProduct& product) {
  const Product& operands = product.operands;
  Block& block = *product.fiber->owner;
  const Operand operand{block.shared, operands.number};
  double a[16 * DEPTH], b[DEPTH * MAX_COLUMNS], c[16 * MAX_COLUMNS];
  const uint64_t from = address(operands.b), distance = (uint64_t)(operands.b >> 16) << 4;
  if (operands.registers) {
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < DEPTH; ++k)
        a[row * DEPTH + k] = element(operands.number, product.rows[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
    for (int box = 0; box < operands.columns / 64; ++box)
      shared_range(block, (int64_t)(from + box * distance), DEPTH * ROW_BYTES, product.at);
    for (int k = 0; k < DEPTH; ++k)
      for (int n = 0; n < operands.columns; ++n)
        b[k * operands.columns + n] = operand.at(from + n / 64 * distance + k * ROW_BYTES + n % 64 * 2);
  } else {
    const uint64_t rows = address(operands.a) + product.warp * 16 * ROW_BYTES;
    shared_range(block, (int64_t)rows, 15 * ROW_BYTES + 2 * DEPTH, product.at);
    shared_range(block, (int64_t)from, (size_t)(operands.columns - 1) * ROW_BYTES + 2 * DEPTH, product.at);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < DEPTH; ++k) a[row * DEPTH + k] = operand.at(rows + row * ROW_BYTES + 2 * k);
    for (int n = 0; n < operands.columns; ++n)
      for (int k = 0; k < DEPTH; ++k) b[k * operands.columns + n] = operand.at(from + n * ROW_BYTES + 2 * k);
  }
  multiply_tile(c, a, b, DEPTH, operands.columns);
  for (int lane = 0; lane < 32; ++lane)
    for (int n = lane % 4 * 2; n < operands.columns; n += 8)
      for (int h = 0; h < 2; ++h)
        for (int e = 0; e < 2; ++e) {
          float* x = n < 128 ? product.x[lane] : product.y[lane];
          float& sum = x[n % 128 / 8 * 4 + 2 * h + e];
          sum = (float)((operands.add ? sum : 0.0) + c[(lane / 4 + 8 * h) * operands.columns + n + e]);
        }
}

void carry_out_group(std::vector<WarpProduct>& group) {
  for (const WarpProduct& product : group) carry_out(product);
  group.clear();
}

void begin_product(void** all, unsigned, Place at) {
  Warp& warp = my_warp();
  if (!warp.products_fenced) fail(at, "wgmma: no warpgroup_arrive since the last wait, after which threads could use the accumulators");
  WarpProduct product;
  product.operands = *(const Product*)all[0];
  product.warp = current->thread.x / 32 % 4, product.at = at, product.fiber = &me();
  for (int lane = 0; lane < 32; ++lane) {
    const Product& mine = *(const Product*)all[lane];
    if (mine.a != product.operands.a || mine.b != product.operands.b || mine.add != product.operands.add)
      fail(at, "wgmma: lane %d has other operands than lane 0", lane);
    product.x[lane] = mine.x, product.y[lane] = mine.y;
    if (mine.registers) memcpy(product.rows[lane], mine.registers, sizeof product.rows[lane]);
  }
  // A product that no earlier product precedes may be done at once; else the scheduler, or a wait, does it later
  bool has_earlier = !warp.open_products.empty();
  for (const auto& group : warp.products) has_earlier |= !group.empty();
  if (!state.random || (!has_earlier && state.chance(2))) carry_out(product);
  else warp.open_products.push_back(product);
}
void fence_all(void**, unsigned, Place) { my_warp().products_fenced = true; }
void commit_all(void**, unsigned, Place) {
  Warp& warp = my_warp();
  warp.products.push_back(std::move(warp.open_products));
  warp.open_products.clear();
}
void wait_all(void** all, unsigned, Place) {
  Warp& warp = my_warp();
  while ((int)warp.products.size() > *(int*)all[0]) {
    carry_out_group(warp.products.front());
    warp.products.erase(warp.products.begin());
  }
  warp.products_fenced = false;
}

}  // namespace

void load_matrices(uint32_t (&r)[4], const void* row, Place at) {
  Matrices mine{(char*)row, r};
  together(~0u, move_matrices<false>, &mine, at);
}

void store_matrices(void* row, const uint32_t (&r)[4], Place at) {
  Matrices mine{(char*)row, (uint32_t*)r};
  my_warp().written.push_back({(char*)row - current->shared, ~0u});
  together(~0u, move_matrices<true>, &mine, at);
}

void multiply(Number number, float* (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Place at) {
  Fragments mine{d, a, {b0, b1}};
  together(~0u, number == Number::BF16 ? multiply_fragments<Number::BF16>
              : number == Number::FP16 ? multiply_fragments<Number::FP16> : multiply_fragments<Number::TF32>,
           &mine, at);
}

void multiply_async(const Product& product, Place at) {
  Product mine = product;
  together(~0u, begin_product, &mine, at);
}
void fence_products(Place at) { together(~0u, fence_all, nullptr, at); }
void commit_products(Place at) { together(~0u, commit_all, nullptr, at); }
void wait_for_products(int groups, Place at) { together(~0u, wait_all, &groups, at); }

// Does the oldest product of a warp that is not done yet. Returns whether there was one. The scheduler calls it after
// one of eight turns of the warp in a random schedule; what remains is done in `wait_for_products`.
bool do_one_product(Warp& warp) {
  std::vector<WarpProduct>* oldest = warp.open_products.empty() ? nullptr : &warp.open_products;
  for (size_t i = warp.products.size(); i-- > 0;)
    if (!warp.products[i].empty()) oldest = &warp.products[i];
  if (!oldest) return false;
  current = oldest->front().fiber;
  carry_out(oldest->front());
  current = nullptr;
  oldest->erase(oldest->begin());
  return true;
}

}  // namespace device
