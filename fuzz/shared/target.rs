//! The library of the fuzz targets: turns the check of a target into a program, one for libFuzzer, or, in a normal build,
//! one that checks files.

/// The program's main function, with an optional initialization.
#[macro_export]
macro_rules! fuzz_target {
    ($check:path $(, init: $init:expr)?) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!($(init: $init,)? |data: &[u8]| $check(data));

        #[cfg(not(fuzzing))]
        fn main() {
            $($init;)?
            $crate::replay($check);
        }
    };
}

/// Checks each file on the command line. A panic ends the program, and so does a file that takes ten seconds.
#[cfg(not(fuzzing))]
pub fn replay(check: impl Fn(&[u8])) {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    let (checked, checks) = channel();
    std::thread::spawn(move || {
        loop {
            match checks.recv_timeout(std::time::Duration::from_secs(10)) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("it takes longer than ten seconds");
                    std::process::exit(1);
                }
            }
        }
    });
    for file in std::env::args_os().skip(1) {
        eprintln!("{}", file.display());
        check(&std::fs::read(file).expect("a readable file"));
        checked.send(()).expect("somebody waits for it");
    }
}
