/* BLOCKS: one thread allocates at site_00; the other frees all but every tenth block, and allocates its own at site_01,
 * which the first one frees. Blocks are passed between the threads, and both reuse freed addresses. */
#include "truth.h"
enum { RING = 64 };
SITE(00, malloc(n)) SITE(01, malloc(n))
static struct { void *volatile block[RING]; volatile uint64_t head, tail; } there, back;
static uint64_t blocks;
static pthread_barrier_t start;

static uint64_t size_of(int site, uint64_t k) { return 64 + (uint64_t)site * 1000 + k % 7 * 48; }
#define SEND(ring, p)                                                                     \
  do {                                                                                    \
    while (ring.head - __atomic_load_n(&ring.tail, __ATOMIC_ACQUIRE) == RING) {}          \
    ring.block[ring.head % RING] = p;                                                     \
    __atomic_store_n(&ring.head, ring.head + 1, __ATOMIC_RELEASE);                        \
  } while (0)
#define RECEIVE(ring, p)                                                                  \
  do {                                                                                    \
    while (__atomic_load_n(&ring.head, __ATOMIC_ACQUIRE) == ring.tail) {}                 \
    p = ring.block[ring.tail % RING];                                                     \
    __atomic_store_n(&ring.tail, ring.tail + 1, __ATOMIC_RELEASE);                        \
  } while (0)

static void *answerer(void *unused) {
  pthread_barrier_wait(&start);
  for (uint64_t k = 0; k < blocks; k++) {
    void *p;
    RECEIVE(there, p);
    if (k % 10) {
      free(p);
      gave(0, size_of(0, k));
    }
    p = site_01(size_of(1, k));
    took(1, size_of(1, k));
    SEND(back, p);
  }
  return unused;
}
int main(int argc, char **argv) {
  blocks = argument(argc, argv, 1, 20000);
  pthread_t id;
  pthread_barrier_init(&start, 0, 2);
  pthread_create(&id, 0, answerer, 0);
  ready();
  pthread_barrier_wait(&start);
  for (uint64_t k = 0; k < blocks; k++) {
    void *p = site_00(size_of(0, k));
    took(0, size_of(0, k));
    SEND(there, p);
    RECEIVE(back, p);
    free(p);
    gave(1, size_of(1, k));
  }
  pthread_join(id, 0);
  report();
  return 0;
}
