/* The contract `otel_memory` by hand: USDT probes as <sys/sdt.h> makes them, so that nothing needs to be installed.
 *
 * An allocator without a name that anybody knows, on pages of its own. It samples bytes with the mean interval `R` while
 * somebody listens, which the semaphores tell, and announces each sample with what it stands for. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN unsigned short otel_memory_alloc_semaphore __attribute__((section(".probes"), used));
HIDDEN unsigned short otel_memory_free_semaphore __attribute__((section(".probes"), used));

__asm__(".pushsection .stapsdt.base,\"aG\",\"progbits\",.stapsdt.base,comdat\n"
        ".weak _.stapsdt.base\n.hidden _.stapsdt.base\n"
        "_.stapsdt.base: .space 1\n.size _.stapsdt.base, 1\n.popsection\n");

#define NOTE(NAME, ARGUMENTS)                                     \
  "990: nop\n"                                                    \
  ".pushsection .note.stapsdt,\"\",\"note\"\n.balign 4\n"          \
  ".4byte 992f-991f, 994f-993f, 3\n"                              \
  "991: .asciz \"stapsdt\"\n992: .balign 4\n"                      \
  "993: .8byte 990b, _.stapsdt.base, otel_memory_" NAME "_semaphore\n" \
  ".asciz \"otel_memory\"\n.asciz \"" NAME "\"\n"                  \
  ".asciz \"" ARGUMENTS "\"\n994: .balign 4\n.popsection\n"

/* Before each block: its size and whether it is a sample. Freed blocks of a size are used again. */
struct head { uint64_t size, sampled; struct head *next; uint64_t unused; };
enum { LISTS = 4096, ARENA = 1 << 28 };
struct announcing {
  uint64_t interval, random, crossings;
  double left;
  char *arena;
  uint64_t used;
  struct head *freed[LISTS];
};

static double drawn(struct announcing *a) {
  uint64_t z = (a->random += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return -log(((double)((z ^ (z >> 31)) >> 11) + 1) * 0x1p-53) * (double)a->interval;
}

/* What a sample stands for; by the count of crossings alone if that is wanted, which is not the contract. */
static uint64_t weighted(struct announcing *a, uint64_t size, uint64_t crossings) {
  if (a->crossings) return crossings * a->interval;
  return (uint64_t)((double)size / -expm1(-(double)size / (double)a->interval));
}

static void announcing_begins(struct announcing *a, uint64_t interval, uint64_t crossings) {
  a->interval = interval; a->crossings = crossings; a->random = 7; a->left = drawn(a);
  a->arena = mmap(0, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (a->arena == MAP_FAILED) abort();
}

/* The announcement is in a function of its own: its place in the stack is below the allocator's. */
static __attribute__((noinline)) void announce(void *block, uint64_t size, uint64_t stands_for) {
  if (size == 48)
    __asm__ volatile(NOTE("alloc", "8@%[p] 8@$48 8@%[w]") : : [p] "r"(block), [w] "r"(stands_for));
  else if (size < 4096) {
    volatile int32_t small = (int32_t)size;
    volatile uint64_t stands = stands_for;
    __asm__ volatile(NOTE("alloc", "8@%[p] -4@%[n] 8@%[w]") : : [p] "r"(block), [n] "m"(small), [w] "m"(stands));
  } else
    __asm__ volatile(NOTE("alloc", "8@%[p] 8@%[n] 8@%[w]") : : [p] "a"(block), [n] "D"(size), [w] "r"(stands_for));
}

static __attribute__((noinline)) void *announced_take(struct announcing *a, uint64_t size) {
  struct head *h = a->freed[size / 16 % LISTS];
  if (h && h->size == size) a->freed[size / 16 % LISTS] = h->next;
  else {
    h = (struct head *)(a->arena + a->used);
    a->used += sizeof *h + ((size + 15) & ~15ull);
    if (a->used > ARENA) abort();
    h->size = size;
  }
  h->sampled = 0;
  if (otel_memory_alloc_semaphore) {
    uint64_t crossings = 0;
    for (a->left -= (double)size; a->left < 0; a->left += drawn(a)) crossings++;
    if (crossings) {
      h->sampled = 1;
      announce(h + 1, size, weighted(a, size, crossings));
    }
  }
  return h + 1;
}

static __attribute__((noinline)) void announced_give(struct announcing *a, void *block) {
  struct head *h = (struct head *)block - 1;
  if (h->sampled && otel_memory_free_semaphore)
    __asm__ volatile(NOTE("free", "8@%[p]") : : [p] "r"(block));
  h->next = a->freed[h->size / 16 % LISTS];
  a->freed[h->size / 16 % LISTS] = h;
}
