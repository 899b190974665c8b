// Emulated products of warpgroups (see asynchronous.h).
#include "asynchronous.h"
#include "emulated_mma.h"

namespace emulation {
namespace {

constexpr uint32_t kPoison = 0x7fc0dead;  // NaN: sums of a pending product

// An operand in shared memory.
struct Operand {
  bool is_outer;
  uint32_t start, leading, stride, base;  // The base offset is where the swizzle's pattern begins, in 128 bytes.
  int swizzle;
  uint32_t width, row;  // of a swizzled row: bytes, elements

  Operand(uint64_t descriptor, bool is_outer)
      : is_outer(is_outer),
        start((uint32_t)(descriptor & 0x3fff) << 4),
        leading((uint32_t)(descriptor >> 16 & 0x3fff) << 4),
        stride((uint32_t)(descriptor >> 32 & 0x3fff) << 4),
        base((uint32_t)(descriptor >> 49 & 7)),
        swizzle((int)(descriptor >> 62)),
        width(swizzle ? 256u >> swizzle : 16),
        row(width / 2) {}

  // Stop unless each group of 8 rows begins where the pattern of the swizzle does.
  void check(int size, Place place) const {
    const uint32_t pattern = 8 * width;
    const bool is_leading_used = is_outer && (uint32_t)size > row;
    if (swizzle ? start % pattern / 128 != base || start % 128 >= width || stride % pattern ||
                      (is_leading_used && leading % pattern)
                : base)
      stop(
          "%s:%d: an operand at shared address %u, leading %u, stride %u, base offset %u is not where its swizzle's "
          "pattern of %u bytes begins",
          place.file, place.line, start, leading, stride, base, pattern);
  }

  // Return the shared address of an element, by its place along rows or columns and along the depth.
  uint32_t address(uint32_t outer, uint32_t depth) const {
    uint32_t at = start;
    if (!is_outer)
      at += outer / 8 * stride + outer % 8 * width + (swizzle ? depth * 2 : depth % 8 * 2 + depth / 8 * leading);
    else
      at += outer % row * 2 + depth % 8 * width +
            (swizzle ? outer / row * leading + depth / 8 * stride : outer / row * stride + depth / 8 * leading);
    return swizzled(at, swizzle, base);
  }

  // Call use(shared address) for the chunks of the operand.
  template <class Use>
  void each_chunk(int size, Use use) const {
    for (uint32_t outer = 0; outer < (uint32_t)size; outer += is_outer ? 8 : 1)
      for (uint32_t depth = 0; depth < 16; depth += is_outer ? 1 : 8) use(address(outer, depth));
  }
};

template <class Use>
void each_operand_chunk(Asynchronous& block, const Pending& product, Use use) {
  const auto chunk = [&](uint32_t address) {
    block.check(address, kChunk, kChunk, product.place);
    use(block.chunks[(address - block.first) / kChunk]);
  };
  if (!product.words) Operand(product.a, product.is_a_outer).each_chunk(64, chunk);
  Operand(product.b, product.is_b_outer).each_chunk(product.columns, chunk);
}

float element(const Asynchronous& block, const Pending& product, const Operand& operand, uint32_t outer,
              uint32_t depth) {
  uint16_t bits;
  memcpy(&bits, block.at(operand.address(outer, depth)), 2);
  return number(bits, product.is_bfloat16);
}

// The element of A(row, depth) in the registers of the threads.
float element(const Pending& product, int row, int depth) {
  const Part& part = product.parts[row / 16 * 32 + row % 8 * 4 + depth % 8 / 2];
  return number(part.copy[row % 16 / 8 + depth / 8 * 2] >> depth % 2 * 16, product.is_bfloat16);
}

// Return the thread's record of fenced registers that contains these, or null.
Fenced* find_fenced(Thread& self, const void* registers, size_t bytes) {
  const char* begin = (const char*)registers;
  for (Fenced& one : self.fenced)
    if (one.registers <= begin && begin + bytes <= one.registers + one.contents.size()) return &one;
  return nullptr;
}

// Stop unless a thread's registers are as they were fenced.
void check_fenced(Thread& self, const void* registers, size_t bytes, Place place) {
  const Fenced* one = find_fenced(self, registers, bytes);
  if (one && !memcmp(registers, one->contents.data() + ((const char*)registers - one->registers), bytes)) return;
  stop("%s:%d: no fence_products() since the registers of a product were used", place.file, place.line);
}

// Multiply, and return the sums by thread and register.
std::vector<float> compute(const Asynchronous& block, const Pending& product) {
  const Operand of_a(product.a, product.is_a_outer), of_b(product.b, product.is_b_outer);
  const int columns = product.columns, registers = columns / 2;
  std::vector<float> a(64 * 16), b((size_t)(16 * columns)), sums((size_t)(64 * columns)), result(sums.size());
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row)
      a[(size_t)(row * 16 + k)] =
          product.words ? element(product, row, k) : element(block, product, of_a, (uint32_t)row, (uint32_t)k);
    for (int column = 0; column < columns; ++column)
      b[(size_t)(k * columns + column)] = element(block, product, of_b, (uint32_t)column, (uint32_t)k);
  }
  const auto place = [&](int thread, int i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    return (size_t)(row * columns + i / 4 * 8 + thread % 4 * 2 + i % 2);
  };
  for (int thread = 0; thread < kGroup && product.accumulates; ++thread)
    for (int i = 0; i < registers; ++i) sums[place(thread, i)] = product.parts[thread].values[(size_t)i];
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < columns; ++column)
        sums[(size_t)(row * columns + column)] += a[(size_t)(row * 16 + k)] * b[(size_t)(k * columns + column)];
  for (int thread = 0; thread < kGroup; ++thread)
    for (int i = 0; i < registers; ++i) result[(size_t)(thread * registers + i)] = sums[place(thread, i)];
  return result;
}

// Give a thread its sums: to the next product of the same registers that it has started, or to the registers.
void deliver(Asynchronous& block, Warpgroup& group, const Pending& product, int lane, std::vector<float> sums) {
  const Part& part = product.parts[lane];
  if (part.words && memcmp(part.words, part.copy, sizeof part.copy))
    stop("%s:%d: registers of A changed before the product had finished", product.place.file, product.place.line);
  for (Pending& next : group.products) {
    if (next.parts[lane].sums != part.sums) continue;
    next.parts[lane].values = std::move(sums);
    return;
  }
  for (size_t i = 0; i < sums.size(); ++i)
    if (memcmp(&part.sums[i], &kPoison, 4))
      stop("%s:%d: sums were written before the product had finished", product.place.file, product.place.line);
  memcpy(part.sums, sums.data(), sums.size() * 4);
  Thread& owner = block.threads[(size_t)((&group - block.groups.data()) * kGroup + lane)];
  if (Fenced* one = find_fenced(owner, part.sums, sums.size() * 4))
    memcpy(&one->contents[(size_t)((char*)part.sums - one->registers)], sums.data(), sums.size() * 4);
}

void finish_product(Asynchronous& block, Warpgroup& group) {
  const Pending product = std::move(group.products.front());
  group.products.pop_front();
  ++group.finished;
  each_operand_chunk(block, product, [](Chunk& chunk) { --chunk.reads; });
  const std::vector<float> all = compute(block, product);
  const long registers = product.columns / 2;
  for (int lane = 0; lane < kGroup; ++lane)
    deliver(block, group, product, lane, {all.begin() + lane * registers, all.begin() + (lane + 1) * registers});
}

// Return the warpgroup's product that the running thread starts, which other threads may have started before.
Pending& started(Warpgroup& group, Thread& self, const Product& product, Place place) {
  const size_t index = (size_t)(self.products++ - group.finished);
  if (index == group.products.size()) {
    group.products.emplace_back();
    (Product&)group.products[index] = product;
    group.products[index].place = place;
    if (!product.words) Operand(product.a, product.is_a_outer).check(64, place);
    Operand(product.b, product.is_b_outer).check(product.columns, place);
  }
  Pending& one = group.products[index];
  if (one.columns != product.columns || one.a != product.a || one.b != product.b ||
      one.accumulates != product.accumulates || one.is_a_outer != product.is_a_outer ||
      one.is_b_outer != product.is_b_outer || !one.words != !product.words)
    stop("threads of a warpgroup start different products at %s:%d and %s:%d", place.file, place.line, one.place.file,
         one.place.line);
  ++one.started;
  return one;
}

}  // namespace

void fence_registers(const void* registers, size_t bytes) {
  Thread& self = asynchronous->self();
  for (size_t i = 0; i < self.fenced.size(); ++i)
    if (self.fenced[i].registers == registers) self.fenced.erase(self.fenced.begin() + (long)i--);
  self.fenced.push_back({(const char*)registers, std::string((const char*)registers, bytes)});
}

void multiply(float* sums, const Product& product, Place place) {
  Asynchronous& block = *asynchronous;
  Thread& self = block.self();
  Warpgroup& group = block.group();
  const size_t bytes = (size_t)product.columns / 2 * 4;
  const int lane = thread() % kGroup;
  bool is_pending = false;
  for (const Pending& other : group.products) is_pending |= other.parts[lane].sums == sums;
  Pending& one = started(group, self, product, place);
  Part& part = one.parts[lane];
  part.sums = sums, part.words = product.words;
  if (part.words) {
    check_fenced(self, part.words, sizeof part.copy, place);
    memcpy(part.copy, part.words, sizeof part.copy);
  }
  if (!is_pending) {
    if (product.accumulates) check_fenced(self, sums, bytes, place);
    if (!find_fenced(self, sums, bytes)) check_fenced(self, sums, bytes, place);
    part.values.assign(sums, sums + product.columns / 2);
    for (int i = 0; i < product.columns / 2; ++i) memcpy(&sums[i], &kPoison, 4);
  }
  // The operands must be ready for the first thread that starts the product.
  if (one.started == 1) each_operand_chunk(block, one, [&](Chunk& chunk) { block.begin_use(chunk, false, place); });
  if (one.started < kGroup) return;
  if (group.group != self.product_groups.size() + 1) {
    group.group = self.product_groups.size() + 1;
    group.patience = draw_patience();
  }
  ++block.pending;
  const auto is_first = [&group, &one] { return &group.products.front() == &one; };
  const auto finish = [&block, &group] {
    --block.pending;
    finish_product(block, group);
  };
  tasks.push_back({group.patience, &group, is_first, finish});
}

void commit_products() {
  Thread& self = asynchronous->self();
  self.product_groups.push_back(self.products);
}

// The lanes of a warp wait together.
void wait_products(int groups, Place place) {
  Thread& self = asynchronous->self();
  const Warpgroup& group = asynchronous->group();
  meet(Collective::warp_barrier, 0xffffffff, 0, 0, place);
  self.fenced.clear();
  const size_t committed = self.product_groups.size();
  if (committed <= (size_t)groups) return;
  const uint64_t count = self.product_groups[committed - 1 - (size_t)groups];
  wait_until([&] { return group.finished >= count; }, "wait_products", place, {&group});
}

}  // namespace emulation
