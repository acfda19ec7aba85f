/* ROUNDS: libc functions that call its allocator. Their blocks are real allocations, made below the site. */
#include "truth.h"
static char input[64 * 1024], buffer[64 * 1024], text[600];
NOINLINE char *site_00(size_t n) {
  text[n] = 0;
  char *p = strdup(text);
  text[n] = 'x';
  KEEP(p);
  return p;
}
NOINLINE char *site_01(FILE *from, size_t *capacity) {
  char *line = 0;
  if (getline(&line, capacity, from) < 0) die("getline");
  KEEP(line);
  return line;
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 100);
  if (rounds > 100) die("at most 100 rounds");
  memset(text, 'x', sizeof text);
  /* Alternates short lines (glibc's initial buffer of 120 bytes suffices) and long ones (the buffer grows once). */
  char *w = input;
  for (uint64_t r = 0; r < rounds; r++) {
    size_t n = r % 2 ? 400 : 40;
    memset(w, 'y', n);
    w[n] = '\n';
    w += n + 1;
  }
  FILE *from = fmemopen(input, (size_t)(w - input), "r");
  setvbuf(from, buffer, _IOFBF, sizeof buffer);
  ungetc(getc(from), from); /* the whole line is buffered now, so one growth suffices */
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    size_t n = 10 + r % 50 * 10;
    char *p = site_00(n); took(0, n + 1);
    if (r % 10) { free(p); gave(0, n + 1); }
    size_t capacity = 0;
    p = site_01(from, &capacity);
    took(1, 120);
    if (capacity != 120) { gave(1, 120); took(1, capacity); }
    if (r % 10) { free(p); gave(1, capacity); }
  }
  report();
  return 0;
}
