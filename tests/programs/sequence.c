/* CYCLES SIZExCOUNT...: the same sequence of sizes over and over, a site for each, all freed at once. These mixes
 * bias a sampler that carries the rest of a large allocation over to the small ones after it. */
#include "truth.h"
enum { CLASSES = 4 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n))
static void *(*const site[CLASSES])(size_t) = {site_00, site_01, site_02, site_03};
int main(int argc, char **argv) {
  uint64_t cycles = argument(argc, argv, 1, 1000), sizes[CLASSES], counts[CLASSES];
  int classes = argc - 2;
  if (classes < 1 || classes > CLASSES) die("1 to 4 classes");
  for (int i = 0; i < classes; i++) {
    char *rest;
    sizes[i] = strtoull(argv[i + 2], &rest, 10);
    counts[i] = strtoull(rest + 1, 0, 10);
  }
  ready();
  for (uint64_t c = 0; c < cycles; c++)
    for (int i = 0; i < classes; i++)
      for (uint64_t k = 0; k < counts[i]; k++) {
        void *p = site[i](sizes[i]); took(i, sizes[i]);
        free(p); gave(i, sizes[i]);
      }
  report();
  return 0;
}
