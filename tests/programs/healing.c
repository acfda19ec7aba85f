/* BLOCKS FREED OPS: step 1 allocates BLOCKS blocks; step 2 makes and frees OPS more, then frees FREED of step 1's. */
#include "truth.h"
enum { MOST = 100000 };
SITE(00, malloc(n))
SITE(01, malloc(n))
static void *blocks[MOST];
int main(int argc, char **argv) {
  uint64_t many = argument(argc, argv, 1, 200), freed = argument(argc, argv, 2, 150), ops = argument(argc, argv, 3, 5000);
  if (many > MOST || freed > many) die("too many blocks");
  ready();
  for (uint64_t k = 0; k < many; k++) { blocks[k] = site_00(1000); took(0, 1000); }
  step();
  for (uint64_t k = 0; k < ops; k++) { free(site_01(50)); took(1, 50); gave(1, 50); }
  for (uint64_t k = 0; k < freed; k++) { free(blocks[k]); gave(0, 1000); }
  report();
  return 0;
}
