/* ROUNDS: blocks whose lifetimes are known. 00 is freed at once; 01 after another allocation (02, freed after it);
 * 03 after 100 ms; 04 the last third after 100 ms, the rest never (those are older, however the program is delayed);
 * 05 at once, by another thread; 06 ten small blocks freed at once for each large one that stays allocated; 07 8 MiB, all
 * in use at the same time, then freed. */
#include "truth.h"
enum { HELD = 60, LARGE = 65536, SMALL = 16, PEAK = 128 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
SITE(04, malloc(n)) SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n))
static void *volatile handed;
static volatile int over;

static void *other(void *unused) {
  while (!over) {
    void *p = __atomic_load_n(&handed, __ATOMIC_ACQUIRE);
    if (!p) continue;
    free(p); gave(5, 100);
    __atomic_store_n(&handed, 0, __ATOMIC_RELEASE);
  }
  return unused;
}
static void hold(void) {
  struct timespec left = {0, 100 * 1000 * 1000};
  while (nanosleep(&left, &left)) {}
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 300);
  static void *held[2][HELD], *peak[PEAK];
  pthread_t id;
  pthread_create(&id, 0, other, 0);
  ready();
  for (uint64_t k = 0; k < rounds; k++) {
    void *p = site_00(100); took(0, 100);
    free(p); gave(0, 100);
    p = site_01(100); took(1, 100);
    void *q = site_02(100); took(2, 100);
    free(p); gave(1, 100);
    free(q); gave(2, 100);
    p = site_05(100); took(5, 100);
    __atomic_store_n(&handed, p, __ATOMIC_RELEASE);
    while (__atomic_load_n(&handed, __ATOMIC_ACQUIRE)) {}
    for (volatile int i = 0; i < 11; i++) { /* volatile, so that both sizes share one call */
      uint64_t n = i ? SMALL : LARGE;
      p = site_06(n); took(6, n);
      if (!i) continue; /* stays */
      free(p); gave(6, n);
    }
  }
  for (int i = 0; i < PEAK; i++) { peak[i] = site_07(LARGE); took(7, LARGE); }
  for (int i = 0; i < PEAK; i++) { free(peak[i]); gave(7, LARGE); }
  for (int i = 0; i < HELD; i++) {
    held[0][i] = site_03(100); took(3, 100);
    held[1][i] = site_04(100); took(4, 100);
  }
  hold();
  for (int i = 0; i < HELD; i++) {
    free(held[0][i]); gave(3, 100);
    if (i < HELD / 3 * 2) continue;
    free(held[1][i]); gave(4, 100);
  }
  over = 1;
  pthread_join(id, 0);
  report();
  return 0;
}
