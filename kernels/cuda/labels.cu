// Classes of rows, from labels (`sup_con`), and row shares, from weights. kernels/gpu/labels.py launches sort_labels,
// then merge_labels until one sorted run is left, then find_classes.
//
// Rows are sorted by their labels. Rows of one label keep their order, and there are no atomics, so that the bits
// are the same in every run. The host reads no result, so it does not know the number of classes.
#include "sorted.cuh"

constexpr int SORT_THREADS = 1024, SORT_ROWS = 2 * SORT_THREADS;

// Sorts each run of SORT_ROWS rows by their labels, by a bitonic sort; a thread block sorts a run. `sorted` gets the
// labels in ascending order, and `order` the rows that have these labels. If `negative_apart` is 1, a row i
// with a negative label is a class by itself: its label becomes -1 - i, which no other row has. `ids` (null: not
// wanted) gets the label of each row i, in the order of the rows.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
sort_labels(const i64* labels, i64 n, i64 negative_apart, i64* ids, i64* sorted, i64* order) {
  __shared__ i64 label[SORT_ROWS];
  __shared__ int row[SORT_ROWS];
  const i64 first = blockIdx.x * (i64)SORT_ROWS;
  for (int at = threadIdx.x; at < SORT_ROWS; at += SORT_THREADS) {
    const i64 i = first + at;
    i64 id = 0x7fffffffffffffffLL;  // fills the last run: the largest number, so that it is sorted after all rows
    if (i < n) {
      id = negative_apart && labels[i] < 0 ? -1 - i : labels[i];
      if (ids) ids[i] = id;
    }
    label[at] = id, row[at] = at;
  }
  for (int size = 2; size <= SORT_ROWS; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();  // the exchanges of the last step come before these
      // A thread compares the elements at a and b, and exchanges them if they have the wrong order. The direction of
      // the order alternates between neighbouring groups of `size` elements
      const int t = threadIdx.x, a = 2 * t - (t & (step - 1)), b = a + step;
      const bool ascending = label[a] < label[b] || (label[a] == label[b] && row[a] < row[b]);
      if (ascending != ((a & size) == 0)) {
        const i64 label_a = label[a];
        const int row_a = row[a];
        label[a] = label[b], row[a] = row[b];
        label[b] = label_a, row[b] = row_a;
      }
    }
  __syncthreads();  // the exchanges come before the reads below
  for (int at = threadIdx.x; at < SORT_ROWS && first + at < n; at += SORT_THREADS)
    sorted[first + at] = label[at], order[first + at] = first + row[at];
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

// Writes four numbers for each row. Only classes of at least `least` rows have sums (3, or 2 with `decoupled`). In a
// class of two rows without a sum, each row gets its only positive instead.
//   - positives: the other row of the class, if the class has two rows and no sum; else -1
//   - present: 1 if the class has other rows, so that the row has a positive; else 0
//   - segment: the index of the class among the sums of classes, or -1 if the class has no sum. The rows of a class
//     with a sum are at least `least` neighbours in the sorted order, so a multiple of `least` is among their
//     positions. The first such multiple, divided by `least`, is the index, from 0 to (n - 1) / least rounded down. So
//     no two classes have one index, and nothing is counted. Some indices may have no class.
//   - others: the number of other rows of the class, or 0 if the class has no sum
extern "C" __global__ void find_classes(const i64* sorted, const i64* order, i64 n, i64 least,
                                        i64* positives, double* present, i64* segment, i64* others) {
  const i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= n) return;
  const i64 row = order[at], label = sorted[at];
  const i64 begin = count_before(sorted, 0, at, label, 0);
  const i64 end = at + count_before(sorted, at, n, label, 1), size = end - begin;  // the class: [begin, end)
  positives[row] = size == 2 && least > 2 ? order[begin + end - 1 - at] : -1;
  present[row] = size > 1;
  segment[row] = size < least ? -1 : (begin + least - 1) / least;
  others[row] = size < least ? 0 : size - 1;
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
