/* BLOCKS: allocates that many blocks on 16,384 stacks, without a pause of more than a millisecond among 64 of them, and frees none.
 * Prints READY and its pid, works after a line, prints DONE, and ends at the next line. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *volatile last;
/* Thirteen levels of two functions each, and two leaves. */
#define L(k, below) \
 __attribute__((noinline)) static void a##k(int n) { if (n >> k & 1) a_##below(n); else b_##below(n); last = 0; } \
 __attribute__((noinline)) static void b##k(int n) { if (n >> k & 1) a_##below(n); else b_##below(n); last = last; }
static void a_leaf(int n) { last = malloc(16 + n % 64); }
static void b_leaf(int n) { last = malloc(32 + n % 64); }
#define a_0 a0
#define b_0 b0
#define a_1 a1
#define b_1 b1
#define a_2 a2
#define b_2 b2
#define a_3 a3
#define b_3 b3
#define a_4 a4
#define b_4 b4
#define a_5 a5
#define b_5 b5
#define a_6 a6
#define b_6 b6
#define a_7 a7
#define b_7 b7
#define a_8 a8
#define b_8 b8
#define a_9 a9
#define b_9 b9
#define a_10 a10
#define b_10 b10
#define a_11 a11
#define b_11 b11
#define a_12 a12
#define b_12 b12
L(0, leaf) L(1, 0) L(2, 1) L(3, 2) L(4, 3) L(5, 4) L(6, 5) L(7, 6) L(8, 7) L(9, 8) L(10, 9) L(11, 10) L(12, 11)

static void wait_line(void) {
  char c = 0;
  while (c != '\n' && read(0, &c, 1) > 0) {}
}
int main(int count, char **arguments) {
  int blocks = count > 1 ? atoi(arguments[1]) : 1000;
  printf("READY %d\n", getpid());
  fflush(stdout);
  wait_line();
  for (int i = 0; i < blocks; i++) {
    if (i >> 13 & 1) a12(i); else b12(i);
    if (i % 64 == 0) usleep(1000);
  }
  printf("DONE\n");
  fflush(stdout);
  wait_line();
  return 0;
}
