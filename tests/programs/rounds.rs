//! What programs of Rust with one site have in common. The protocol is that of truth.h: ROUNDS blocks of 100 bytes are allocated,
//! and every fourth stays allocated.
use std::io::{Read, Write};

fn wait() {
    let mut byte = [0];
    while std::io::stdin().read(&mut byte).is_ok_and(|n| n > 0) && byte[0] != b'\n' {}
}

pub fn run(site_00: extern "C" fn(u8) -> *mut [u8; 100], free: fn(*mut [u8; 100])) {
    let rounds: u64 = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(100);
    let pid = std::process::id();
    println!("READY {pid}");
    wait();
    for round in 0..rounds {
        let block = site_00(round as u8);
        if round % 4 != 0 {
            free(block);
        }
    }
    let live = rounds.div_ceil(4);
    println!(
        "{{\"failed\":0,\"abandoned\":0,\"sites\":[{{\"pid\":{pid},\"site\":\"site_00\",\"allocs\":{rounds},\"bytes\":{},\
         \"live_allocs\":{live},\"live_bytes\":{},\"sizes\":[[100,{rounds},{live}]]}}]}}",
        rounds * 100,
        live * 100
    );
    std::io::stdout().flush().unwrap();
    wait();
}
