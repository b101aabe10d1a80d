// Paged attention over a ragged batch: prefill chunks and decodes in one call.
//
// Invariant: what a query row gets depends on its query and its context alone. Every row walks its context in the
// same tiles and parts and, inside a tile, adds in the same order; the number of rows processed together, the threads
// and the batch only decide when that happens. This is what makes generation batch-invariant, and the tests demand
// equal bits.
//
// The online softmax is that of Milakov and Gimelshein (2018), tiled as in FlashAttention (Dao et al., 2022); a long
// context is split among cores and merged as in Flash-Decoding (Dao et al., 2023); the block table is vLLM's (Kwon et
// al., 2023).
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <unordered_set>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/paged_attention.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

#define TWINFER_ISA_BODY "cpu/paged_attention.inc"
#include "cpu/for_each_isa.inc"

namespace twinfer::cpu {
namespace {

constexpr int kJobsPerThread = 4;   // fewer, and a thread may wait for the last job

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};

// The calling thread's memory, kept from call to call. What an earlier call left there is not cleared.
float* borrow(size_t count) {
  thread_local std::unique_ptr<float[], AlignedDelete> memory;
  thread_local size_t size = 0;
  if (count > size) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
    size = count;
  }
  return memory.get();
}

// To whole lines, which are also the widest vectors.
size_t round_up(size_t count) {
  constexpr auto kFloats = static_cast<size_t>(kLineFloats);
  return (count + kFloats - 1) / kFloats * kFloats;
}

// Splits every sequence's query rows into jobs for all heads and the whole context.
std::vector<AttentionJob> split_rows(const PagedAttention& args) {
  const int rows_per_job = std::max(1, kMaxJobRows / (args.num_heads / args.num_kv_heads));
  std::vector<AttentionJob> jobs;
  for (int64_t s = 0; s < args.num_seqs; ++s) {
    const int64_t begin = args.query_start_loc[s], end = args.query_start_loc[s + 1];
    const int64_t computed = args.seq_lens[s] - (end - begin);
    for (int64_t row = begin; row < end; row += rows_per_job) {
      AttentionJob job{};
      job.seq = s;
      job.first_row = row;
      job.num_rows = static_cast<int>(std::min<int64_t>(rows_per_job, end - row));
      job.first_context = computed + (row - begin) + 1;
      job.num_heads = args.num_kv_heads;
      // Rows only move right: what lies left of the first row's window no row of this job sees.
      job.first_part = std::max<int64_t>(0, job.first_context - args.sliding_window) / kPart;
      job.end_part = (job.longest_context() + kPart - 1) / kPart;
      jobs.push_back(job);
    }
  }
  return jobs;
}

// One job for each KV head. A job for all of them reads whole rows of K and V, one after the other; so this is for few.
std::vector<AttentionJob> split_heads(const std::vector<AttentionJob>& jobs) {
  std::vector<AttentionJob> split;
  for (AttentionJob job : jobs) {
    const int num_heads = std::exchange(job.num_heads, 1);
    for (job.first_head = 0; job.first_head < num_heads; ++job.first_head) split.push_back(job);
  }
  return split;
}

// One job for each part of the context, so that one long sequence keeps all cores busy.
std::vector<AttentionJob> split_parts(const std::vector<AttentionJob>& jobs) {
  std::vector<AttentionJob> split;
  for (AttentionJob job : jobs) {
    const int64_t end = job.end_part;
    for (int64_t part = job.first_part; part < end; ++part) {
      job.first_part = part;
      job.end_part = part + 1;
      split.push_back(job);
    }
  }
  return split;
}

struct Layout {
  size_t rows;   // M
  size_t depth;  // D
  size_t width;

  size_t softmax_floats() const { return round_up(rows * width) + 2 * round_up(rows); }
  size_t scratch_floats() const {
    return round_up(rows * width) + kMaxBlockRows * kTile + depth * kTile + kTile * width + 2 * softmax_floats();
  }
  Softmax softmax_at(float* base) const {
    const size_t acc = round_up(rows * width);
    return {base, base + acc, base + acc + round_up(rows)};
  }
  Scratch scratch_at(float* base) const {
    Scratch scratch{};
    const auto take = [&base](size_t count) { return std::exchange(base, base + count); };
    scratch.query = take(round_up(rows * width));
    scratch.weights = take(kMaxBlockRows * kTile);
    scratch.keys = take(depth * kTile);
    scratch.values = take(kTile * width);
    scratch.all = softmax_at(take(softmax_floats()));
    scratch.part = softmax_at(take(softmax_floats()));
    scratch.width = static_cast<int>(width);
    return scratch;
  }
};

// How the work is cut up. It decides who computes what, never what is computed.
struct AttentionPlan {
  std::vector<AttentionJob> jobs;
  std::vector<AttentionJob> merges;  // jobs whose parts are jobs of their own; their parts follow each other in `jobs`
  Layout layout;
  int64_t work = 0;
};

AttentionPlan plan_jobs(const PagedAttention& args, int threads) {
  AttentionPlan plan;
  plan.jobs = split_rows(args);
  const auto enough = [&] { return threads == 1 || static_cast<int>(plan.jobs.size()) >= kJobsPerThread * threads; };
  if (!enough()) plan.jobs = split_heads(plan.jobs);
  size_t most_rows = 0, num_parts = 0;
  for (const AttentionJob& job : plan.jobs) {
    most_rows = std::max(most_rows, static_cast<size_t>(job.num_rows) * static_cast<size_t>(job.num_heads));
    num_parts += static_cast<size_t>(job.end_part - job.first_part);
    // Two multiply-adds for each head, context token and dimension, eight or so at a time.
    const int64_t seen = std::min(job.first_context, args.sliding_window);
    const int64_t heads = int64_t{job.num_heads} * (args.num_heads / args.num_kv_heads);
    plan.work += job.num_rows * heads * seen * args.head_dim * 2;
  }
  if (!enough() && num_parts > plan.jobs.size()) {
    plan.merges = plan.jobs;
    plan.jobs = split_parts(plan.jobs);
  }
  const auto depth = static_cast<size_t>(args.head_dim);
  const auto group = static_cast<size_t>(args.num_heads / args.num_kv_heads);
  plan.layout = {most_rows * group, depth, round_up(depth)};
  return plan;
}

// Whether two jobs do parts of the same.
bool belong_together(const AttentionJob& a, const AttentionJob& b) {
  return a.seq == b.seq && a.first_row == b.first_row;
}

// Deals the jobs out to the threads' shares like cards, those with the longest context first: shares are about equal
// and end with short jobs. The heads and parts of a context go to one thread, as far as its share has room.
std::vector<AttentionJob> deal_out(std::vector<AttentionJob> jobs, int64_t threads) {
  std::stable_sort(jobs.begin(), jobs.end(), [](const AttentionJob& a, const AttentionJob& b) {
    return a.first_context > b.first_context;
  });
  const auto num_jobs = static_cast<int64_t>(jobs.size());
  std::vector<std::vector<AttentionJob>> hands(static_cast<size_t>(threads));
  const auto room = [&](int64_t thread) {
    return ThreadPool::share_begin(num_jobs, thread + 1, threads) - ThreadPool::share_begin(num_jobs, thread, threads) -
           static_cast<int64_t>(hands[static_cast<size_t>(thread)].size());
  };
  for (auto first = jobs.begin(), last = first; first != jobs.end(); first = last) {
    while (last != jobs.end() && belong_together(*first, *last)) ++last;
    int64_t taker = 0;
    for (int64_t thread = 1; thread < threads; ++thread) taker = room(thread) > room(taker) ? thread : taker;
    hands[static_cast<size_t>(taker)].insert(hands[static_cast<size_t>(taker)].end(), first, last);
  }
  std::vector<AttentionJob> dealt;
  dealt.reserve(jobs.size());
  for (const std::vector<AttentionJob>& hand : hands) dealt.insert(dealt.end(), hand.begin(), hand.end());
  return dealt;
}

int64_t team_of(const AttentionPlan& plan, int threads) {
  return worth_a_team(static_cast<int64_t>(plan.jobs.size()), plan.work, threads) ? threads : 1;
}

// A thread's part of the last cache, about: more would push out what came first.
constexpr int64_t kMaxBytesAhead = int64_t{4} << 20;

}  // namespace

ContextLines lines_to_read(const PagedAttention& args, int threads) {
  AttentionPlan plan = plan_jobs(args, threads);
  const int64_t team = team_of(plan, threads);
  const std::vector<AttentionJob> jobs = deal_out(std::move(plan.jobs), team);
  const auto num_jobs = static_cast<int64_t>(jobs.size());
  const int64_t token_floats = int64_t{args.num_kv_heads} * args.head_dim;
  std::unordered_set<int64_t> known_seqs, known_blocks;
  ContextLines lines(threads);
  for (int64_t i = 0; i < num_jobs; ++i) {
    const AttentionJob& job = jobs[static_cast<size_t>(i)];
    // Of rows in several jobs K and V are used so often that nobody waits for them.
    const int64_t num_rows = args.query_start_loc[job.seq + 1] - args.query_start_loc[job.seq];
    if (num_rows > job.num_rows || !known_seqs.insert(job.seq).second) continue;
    const auto thread = static_cast<int>(ThreadPool::share_of(i, num_jobs, team));
    const int64_t first = std::max<int64_t>(0, job.first_context - args.sliding_window);
    for (int64_t token = first, end; token < args.seq_lens[job.seq]; token = end) {
      const int64_t block = args.block_tables[job.seq][token / args.block_size];
      end = std::min<int64_t>((token / args.block_size + 1) * args.block_size, args.seq_lens[job.seq]);
      if (!known_blocks.insert(block).second) continue;
      const int64_t num_lines = (end - token) * token_floats / kLineFloats;
      if ((lines.num_lines(thread) + 2 * num_lines) * kLineBytes > kMaxBytesAhead) break;
      const int64_t slot = block * args.block_size + token % args.block_size;
      if (num_lines > 0) lines.add(thread, slot * token_floats, num_lines);
    }
  }
  return lines;
}

void paged_attention(const PagedAttention& args, Isa isa, int threads) {
  AttentionPlan plan = plan_jobs(args, threads);
  const auto num_jobs = static_cast<int64_t>(plan.jobs.size());
  const Layout& layout = plan.layout;
  const auto team = static_cast<size_t>(team_of(plan, threads));
  const size_t num_partial = plan.merges.empty() ? 0 : plan.jobs.size();
  float* memory = borrow(layout.scratch_floats() * team + layout.softmax_floats() * num_partial);
  float* partial = memory + layout.scratch_floats() * team;
  for (size_t i = 0; i < num_partial; ++i) plan.jobs[i].part = layout.softmax_at(partial + layout.softmax_floats() * i);
  const std::vector<AttentionJob> parts = plan.merges.empty() ? std::vector<AttentionJob>{} : plan.jobs;
  plan.jobs = deal_out(std::move(plan.jobs), static_cast<int64_t>(team));

  const auto attend = args.head_dim == 64    ? TWINFER_DISPATCH(isa, attend<64>)
                      : args.head_dim == 128 ? TWINFER_DISPATCH(isa, attend<128>)
                                             : TWINFER_DISPATCH(isa, attend<0>);
  parallel_for(num_jobs, plan.work, threads, [&](int64_t index, int thread) {
    const AttentionJob* job = &plan.jobs[static_cast<size_t>(index)];
    attend(args, *job, index + 1 < num_jobs ? job + 1 : nullptr,
           layout.scratch_at(memory + layout.scratch_floats() * static_cast<size_t>(thread)));
  });
  const auto merge = TWINFER_DISPATCH(isa, merge_parts);
  const AttentionJob* next = parts.data();
  for (const AttentionJob& job : plan.merges) {
    merge(args, job, next, static_cast<int>(layout.width));
    next += job.end_part - job.first_part;
  }
}

}  // namespace twinfer::cpu
