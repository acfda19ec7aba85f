//! Tests of seccomp filters' answers: against expected values, and against the kernel.

use super::*;

use libc::SECCOMP_RET_TRAP as TRAP;

/// A system call that no kernel has.
const NO_CALL: u32 = 3999;

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn is_number(number: u32, answer: u32) -> [Instruction; 3] {
    [instruction(0x20, 0, 0, 0), instruction(0x15, 0, 1, number), instruction(0x06, 0, 0, answer)]
}

fn answering(number: u32, answer: u32, otherwise: u32) -> Vec<Instruction> {
    is_number(number, answer).into_iter().chain([instruction(0x06, 0, 0, otherwise)]).collect()
}

#[test]
fn the_sternest_answer_counts() {
    let call = Call { number: 9, ..Call::default() };
    let of = |answers: &[u32]| {
        Filters::new(answers.iter().map(|answer| answering(9, *answer, KILL_PROCESS)).collect()).answer(&call)
    };
    assert_eq!(of(&[]), Answer::Made);
    assert_eq!(of(&[ALLOW, LOG]), Answer::Made);
    assert_eq!(of(&[ALLOW, ERRNO | 38, LOG]), Answer::Fails);
    assert_eq!(of(&[TRACE | 7, ALLOW]), Answer::Fails);
    assert_eq!(of(&[USER_NOTIF, TRACE]), Answer::Asks);
    assert_eq!(of(&[TRAP, ERRNO]), Answer::Ends);
    assert_eq!(of(&[KILL_THREAD, TRAP]), Answer::Ends);
    assert_eq!(of(&[ALLOW, KILL_PROCESS, KILL_THREAD]), Answer::Ends);
    assert_eq!(of(&[0x0001_0000]), Answer::Ends, "unknown");
}

#[test]
fn arguments_and_the_place_of_a_call_are_seen() {
    let call = Call { number: 9, next_instruction: 0x1_2222, arguments: [1, 2, 0x7_0000_0005, 4, 5, 6] };
    let words: Vec<_> = (0..16).map(|word| call.word(4 * word)).map(Option::unwrap).collect();
    assert_eq!(words, [9, MACHINE, 0x1_2222, 0, 1, 0, 2, 0, 5, 7, 4, 0, 5, 0, 6, 0]);
    assert_eq!([call.word(64), call.word(2), call.word(u32::MAX)], [None; 3]);
    // As systemd denies memory that is writable and executable: mmap with both bits of the third argument.
    let denying = vec![
        instruction(0x20, 0, 0, 32),
        instruction(0x54, 0, 0, 6),
        instruction(0x15, 0, 1, 6),
        instruction(0x06, 0, 0, KILL_PROCESS),
        instruction(0x06, 0, 0, ALLOW),
    ];
    let answer = |access| {
        let call = Call { arguments: [0, 0, access, 0, 0, 0], ..call };
        Filters::new(vec![denying.clone()]).answer(&call)
    };
    assert_eq!([answer(3), answer(5), answer(7)], [Answer::Made, Answer::Made, Answer::Ends]);
}

#[test]
fn what_is_no_program_ends_the_process() {
    let call = Call::default();
    for program in [
        vec![],
        vec![instruction(0x05, 0, 0, u32::MAX)],
        vec![instruction(0x20, 0, 0, 64), instruction(0x06, 0, 0, ALLOW)],
        vec![instruction(0x60, 0, 0, 16), instruction(0x06, 0, 0, ALLOW)],
        vec![instruction(0xffff, 0, 0, 0)],
    ] {
        assert_eq!(Filters::new(vec![program]).answer(&call), Answer::Ends);
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// A random program that allows all calls except [`NO_CALL`]. Its answer to that one is a 12-bit error that depends on
/// everything it did.
fn random_program(random: &mut Random) -> Vec<Instruction> {
    const VALUES: [u32; 8] = [0, 1, 2, 31, 0x7fff_ffff, 0x8000_0000, u32::MAX, 0x1234_5678];
    let length = 4 + random.below(40);
    let mut body = Vec::new();
    // All memory is written first, as the kernel demands.
    body.extend((0..16).map(|word| instruction(0x02, 0, 0, word)));
    for at in 0..length {
        let left = (length - at - 1).min(20);
        let any = if random.below(2) == 0 { VALUES[random.below(8) as usize] } else { random.next() as u32 };
        let jump = |random: &mut Random| random.below(left + 1) as u8;
        body.push(match random.below(12) {
            0 => instruction(0x20, 0, 0, 4 * random.below(16) as u32),
            1 => instruction([0x80, 0x81, 0x07, 0x87][random.below(4) as usize], 0, 0, 0),
            2 => instruction([0x00, 0x01][random.below(2) as usize], 0, 0, any),
            3 => instruction([0x60, 0x61, 0x02, 0x03][random.below(4) as usize], 0, 0, random.below(16) as u32),
            4 => instruction(0x05, 0, 0, random.below(left + 1) as u32),
            5..8 => {
                let code = [0x15, 0x25, 0x35, 0x45][random.below(4) as usize] + 8 * random.below(2) as u16;
                let (jt, jf) = (jump(random), jump(random));
                instruction(code, jt, jf, if code & 8 == 0 { any } else { 0 })
            }
            // Shifts by constants, and divisions by numbers other than zero.
            8 => instruction([0x64, 0x74][random.below(2) as usize], 0, 0, random.below(32) as u32),
            9 => instruction(0x34, 0, 0, any.max(1)),
            10 => instruction(0x84, 0, 0, 0),
            _ => {
                let code = [0x04, 0x14, 0x24, 0x34, 0x44, 0x54, 0x64, 0x74, 0xa4][random.below(9) as usize];
                instruction(code | 8, 0, 0, 0)
            }
        });
    }
    // Fold the contents of a and x into twelve bits.
    for distance in [12, 24] {
        body.extend([instruction(0x02, 0, 0, 0), instruction(0x74, 0, 0, distance), instruction(0x07, 0, 0, 0)]);
        body.extend([instruction(0x60, 0, 0, 0), instruction(0xac, 0, 0, 0)]);
    }
    body.extend([instruction(0x54, 0, 0, 0x7ff), instruction(0x04, 0, 0, 1), instruction(0x44, 0, 0, ERRNO)]);
    body.push(instruction(0x16, 0, 0, 0));
    let head = [instruction(0x20, 0, 0, 0), instruction(0x15, 1, 0, NO_CALL), instruction(0x06, 0, 0, ALLOW)];
    head.into_iter().chain(body).collect()
}

/// Installs the filter in a new thread, makes the call there, and returns the error. `None`: this kernel has no
/// filters.
fn by_the_kernel(program: Vec<Instruction>, arguments: [u64; 6]) -> Option<i32> {
    let thread = std::thread::spawn(move || {
        let length = program.len() as u16;
        let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
        // SAFETY: no pointers; then the kernel reads the program; then a call that does not exist. All of this only
        // affects this thread.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            if libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            let [a, b, c, d, e, f] = arguments;
            libc::syscall(libc::c_long::from(NO_CALL), a, b, c, d, e, f);
        }
        Ok(std::io::Error::last_os_error().raw_os_error().expect("an error of the kernel"))
    });
    match thread.join().expect("it does not panic") {
        Ok(error) => Some(error),
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => None,
        Err(error) => panic!("the kernel does not take it: {error}"),
    }
}

/// 400 random programs answer as they do in the kernel. The call's address is not compared, because the C library makes
/// the call.
#[test]
fn random_programs_answer_as_in_the_kernel() {
    let mut random = Random(16);
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..400 {
        let mut program = random_program(&mut random);
        for word in program.iter_mut().filter(|word| word.code == 0x20 && [8, 12].contains(&word.k)) {
            word.k = 24;
        }
        // Division by the index register may be by zero, which kills, so that register is made odd first.
        let divides = program.iter().position(|word| word.code == 0x3c);
        if divides.is_some() {
            program.iter_mut().filter(|word| word.code == 0x3c).for_each(|word| word.code = 0x0c);
        }
        let arguments = std::array::from_fn(|_| random.next() >> random.below(64));
        let call = Call { number: NO_CALL, next_instruction: 0, arguments };
        let Some(error) = by_the_kernel(program.clone(), arguments) else {
            return heapbpf_testing::skipped("this kernel has no seccomp filters");
        };
        assert_eq!(run(&program, &call), ERRNO | error as u32, "round {round}: {program:?}");
        seen.insert(error);
    }
    assert!(seen.len() > 50, "the programs are too much alike: {seen:?}");
}

#[test]
fn any_bytes_are_answered() {
    let mut random = Random(17);
    for _ in 0..100_000 {
        let call =
            Call { number: random.next() as u32, next_instruction: random.next(), arguments: [random.next(); 6] };
        let length = random.below(30);
        let program = (0..length).map(|_| {
            let word = random.next();
            // Codes that exist are more interesting.
            let code = if word & 1 == 0 { (word >> 8) as u16 } else { (word >> 8) as u16 & 0xff };
            instruction(
                code,
                (word >> 24) as u8 & 31,
                (word >> 32) as u8 & 31,
                (random.next() >> random.below(64)) as u32,
            )
        });
        let _ = Filters::new(vec![program.collect()]).answer(&call);
    }
}
