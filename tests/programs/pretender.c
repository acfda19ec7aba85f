/* Maps a file of its own that has the name of an inline hook's memory. */
#include "truth.h"
int main(void) {
  enum { BYTES = 0x20000 };
  char name[64];
  char *place = mmap(0, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  snprintf(name, sizeof name, "heapbpf-inline-%llx-%x", (unsigned long long)(uintptr_t)place, BYTES);
  int fd = memfd_create(name, 0);
  if (place == MAP_FAILED || fd < 0 || ftruncate(fd, BYTES)) die("cannot make a file");
  if (pwrite(fd, "HEAPBPFi\2", 9, 0x1000) != 9) die("cannot write");
  if (mmap(place, BYTES, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, fd, 0) != place) die("cannot map");
  ready();
  report();
  return 0;
}
