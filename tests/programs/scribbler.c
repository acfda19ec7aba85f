/* A library that an interpreter loads: rewrites memory that it is told, allocates while that makes no sense, and puts it back. Nobody
 * reads the memory meanwhile but a profiler. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PLACES = 8, MOST_WORDS = 64 };
static void *volatile last;

/* Allocates ROUNDS blocks of SIZE bytes and frees them. COUNT places of WORDS[i] words each. Returns the number of blocks. */
__attribute__((noinline)) uint64_t scribble(uint64_t **places, const uint64_t *words, uint64_t count, uint64_t rounds,
                                            uint64_t size, uint64_t seed) {
  uint64_t saved[PLACES][MOST_WORDS], done = 0;
  for (uint64_t i = 0; i < count && i < PLACES; i++) memcpy(saved[i], places[i], words[i] * 8);
  for (uint64_t round = 0; round < rounds; round++) {
    uint64_t place = 0;
    for (int change = 0; change < 3; change++) {
      seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
      place = seed % count;
      uint64_t word = (seed >> 8) % words[place], value = seed;
      switch (seed >> 20 & 7) {
      case 0: value = 0; break;
      case 1: value = (uint64_t)places[place]; break;                       /* leads to itself */
      case 2: value = (uint64_t)places[(place + 1) % count]; break;         /* something else that is there */
      case 3: value = (uint64_t)&saved; break;                              /* a copy that changes */
      case 4: value = ~0ull; break;
      case 5: value = 0xffffffff81000000ull; break;                         /* the kernel's */
      case 6: value = saved[place][word] + 8; break;                        /* nearly right */
      default: break;
      }
      places[place][word] = value;
    }
    void *block = malloc(size);
    last = block;
    done += block != 0;
    for (uint64_t i = 0; i < count && i < PLACES; i++) memcpy(places[i], saved[i], words[i] * 8);
    free(block);
  }
  return done;
}
