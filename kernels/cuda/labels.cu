// Classes of rows and keys, from labels (sup_con) or positive ids, and row shares, from weights. kernels/gpu/labels.py launches sort_labels,
// then merge_labels until one sorted run is left, then find_classes.
//
// Rows are sorted by their labels. Rows of one label keep their order, and there are no atomics, so that the bits
// are the same in every run. The host reads no result, so it does not know the number of classes.
#include "sorted.cuh"

constexpr int SORT_THREADS = 256, SORT_ROWS = 2 * SORT_THREADS;

// A row and its label. Rows of one label are in ascending order, so no two are equal.
struct Labelled {
  i64 label;
  int row;

  __device__ __forceinline__ bool operator<(const Labelled& other) const {
    return label < other.label || (label == other.label && row < other.row);
  }
};

// Sorts each run of SORT_ROWS rows by their labels, by a bitonic sort; a thread block sorts a run. `sorted` gets the
// labels in ascending order, and `order` the rows that have these labels. If `negative_apart` is 1, a row i
// with a negative label is a class by itself: its label becomes -1 - i, which no other row has. `ids` (null: not
// wanted) gets the label of each row i, in the order of the rows.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
sort_labels(const i64* labels, i64 n, i64 negative_apart, i64* ids, i64* sorted, i64* order) {
  __shared__ i64 shared_labels[SORT_ROWS];
  __shared__ int shared_rows[SORT_ROWS];
  const int t = threadIdx.x;
  const i64 first = blockIdx.x * (i64)SORT_ROWS;
  Labelled mine[2];  // at positions 2 t and 2 t + 1 of the run
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const i64 i = first + 2 * t + e;
    // Fills the last run: the largest number, so that it is sorted after all rows
    mine[e] = {0x7fffffffffffffffLL, 2 * t + e};
    if (i < n) {
      mine[e].label = negative_apart && labels[i] < 0 ? -1 - i : labels[i];
      if (ids) ids[i] = mine[e].label;
    }
  }
  // In each step, the elements at positions that differ by `step` are compared, and have to be in ascending order in
  // every other group of `size` elements, else in descending order
  for (int size = 2; size <= SORT_ROWS; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      const bool ascending = (2 * t & size) == 0;
      if (step == 1) {
        if (mine[1] < mine[0] == ascending) {
          const Labelled x = mine[0];
          mine[0] = mine[1], mine[1] = x;
        }
        continue;
      }
      Labelled others[2];
      if (step <= 32) {  // of a thread of this warp
#pragma unroll
        for (int e = 0; e < 2; ++e)
          others[e] = {__shfl_xor_sync(ALL_LANES, mine[e].label, step / 2),
                       __shfl_xor_sync(ALL_LANES, mine[e].row, step / 2)};
      } else {
        __syncthreads();  // the reads of the last step come before these writes
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // all first elements, then all second ones: neighbours are in other banks
          const int at = e * SORT_THREADS + t;
          shared_labels[at] = mine[e].label, shared_rows[at] = mine[e].row;
        }
        __syncthreads();  // these writes come before the reads below
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = e * SORT_THREADS + (t ^ (step / 2));
          others[e] = {shared_labels[at], shared_rows[at]};
        }
      }
      const bool is_first = (2 * t & step) == 0;  // of the two
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (others[e] < mine[e] == (is_first == ascending)) mine[e] = others[e];
    }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const i64 at = first + 2 * t + e;
    if (at < n) sorted[at] = mine[e].label, order[at] = first + mine[e].row;
  }
}

// Merges each pair of neighbouring sorted runs of `run` rows to one sorted run. A thread moves one row. Its position in
// the merged run is its position in its own run, plus the number of rows of the other run that come before it. Of two
// rows with one label, the row of the first run comes first.
extern "C" __global__ void merge_labels(const i64* sorted, const i64* order, i64 n, i64 run,
                                        i64* merged, i64* merged_order) {
  const i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= n) return;
  const i64 own = at / run, other = own ^ 1;
  const i64 begin = min(other * run, n), end = min(begin + run, n);
  const i64 to = own / 2 * 2 * run + at % run + count_before(sorted, begin, end, sorted[at], own % 2);
  merged[to] = sorted[at], merged_order[to] = order[at];
}

// The positions of a label among the `n` labels of `keys`, which are in ascending order.
struct Range {
  i64 begin, end;
};
__device__ __forceinline__ Range find_range(const i64* keys, i64 n, i64 label) {
  return {count_before(keys, 0, n, label, 0), count_before(keys, 0, n, label, 1)};
}

// The index of the class among the sums of classes, or -1 if the class has no sum, because it has fewer than `least`
// keys. Keys of a class with a sum are at least `least` neighbours in the sorted order, so a multiple of `least` is
// among their positions. The first such multiple, divided by `least`, is the index, from 0 to (n - 1) / least rounded
// down. So no two classes have one index, and nothing is counted. Some indices may have no class.
__device__ __forceinline__ i64 find_segment(Range keys, i64 least) {
  return keys.end - keys.begin < least ? -1 : (keys.begin + least - 1) / least;
}

// Writes four numbers for each of m rows. The rows and their labels are sorted, and so are the keys: `keys` are the n
// labels of the keys in `key_order`. If `apart` is 1, rows are the keys, and a row is no positive of itself. Only
// classes of at least `least` keys have sums: their rows have several positives (`decoupled`: one or more).
//   - positives: the only positive of a row that has one, unless `decoupled`; else -1
//   - present: 1 if the row has a positive; else 0 (null: not wanted)
//   - segment: see `find_segment`
//   - positive_count: the number of the row's positives, or 0 if the class has no sum
extern "C" __global__ void find_classes(const i64* sorted, const i64* order, i64 m, const i64* keys,
                                        const i64* key_order, i64 n, i64 apart, i64 least, i64 decoupled,
                                        i64* positives, double* present, i64* segment, i64* positive_count) {
  const i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= m) return;
  const i64 row = order[at];
  const Range range = find_range(keys, n, sorted[at]);
  const i64 count = range.end - range.begin - apart;
  // with `apart`, position `at` is in the range; of two positions, the other one has the positive
  const i64 single = apart ? range.begin + range.end - 1 - at : range.begin;
  positives[row] = count == 1 && !decoupled ? key_order[single] : -1;
  if (present) present[row] = count > 0;
  segment[row] = find_segment(range, least);
  positive_count[row] = segment[row] < 0 ? 0 : count;
}

// Writes the `segment` of each of n keys that are no rows: -1 if no row has the label of the key, because no sum of rows
// exists then. `sorted` are the labels of m rows.
extern "C" __global__ void find_key_segments(const i64* keys, const i64* key_order, i64 n, const i64* sorted, i64 m,
                                             i64 least, i64* segment) {
  const i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= n) return;
  const Range rows = find_range(sorted, m, keys[at]);
  segment[key_order[at]] = rows.begin == rows.end ? -1 : find_segment(find_range(keys, n, keys[at]), least);
}

constexpr int SHARE_THREADS = 1024;

// shares[i] = weights[i] / sum of all weights, by one thread block; 0 if the sum is 0.
extern "C" __global__ void __launch_bounds__(SHARE_THREADS)
find_shares(const double* weights, i64 n, double* shares) {
  __shared__ double memory[SHARE_THREADS / 32];
  double sum = 0;
#pragma unroll 8
  for (i64 i = threadIdx.x; i < n; i += SHARE_THREADS) sum += weights[i];
  sum = block_reduce<SHARE_THREADS>(sum, memory, [](double a, double b) { return a + b; });
  for (i64 i = threadIdx.x; i < n; i += SHARE_THREADS) shares[i] = weights[i] / (sum == 0 ? 1 : sum);
}
