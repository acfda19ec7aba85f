//! What clients send, and token files: parameters, filters and scopes.

use heapbpf_access::filter::Filter;
use heapbpf_access::parameters::Parameters;
use heapbpf_access::tokens::Tokens;
use heapbpf_profile::model::Process;

/// Maximum length of a text in bytes. Each name pattern is compiled, which takes as long as thousands of other bytes.
const MOST_BYTES: usize = 512;

/// Checks a text, both as a token file and with each of its lines as a query.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(&data[..data.len().min(MOST_BYTES)]) else { return };
    text.lines().for_each(query);
    let Ok(tokens) = Tokens::parse(text) else { return };
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_ascii_whitespace().collect()).collect();
    let known: Vec<&[&str]> = lines.iter().map(Vec::as_slice).filter(|line| is_token(line)).collect();
    assert_eq!(tokens.count(), known.len());
    for line in &known {
        let (number, scope) = tokens.scope(line[0]).expect("each token is known");
        assert_eq!(known[number][0], line[0]);
        holds(scope, known[number][1..].iter().copied());
        let longer = format!("{}.", line[0]);
        assert!(tokens.scope(&longer).is_none_or(|(number, _)| known[number][0] == longer), "no other is taken for it");
    }
}

fn is_token(line: &[&str]) -> bool {
    line.first().is_some_and(|word| !word.starts_with('#'))
}

/// Checks a query after its escapes were decoded.
fn query(line: &str) {
    let pairs: Vec<&str> = line.split('&').collect();
    let split = pairs.iter().map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let decoded: Vec<(String, String)> = split.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let Ok(parameters) = Parameters::parse(&decoded) else { return };
    holds(&parameters.filter, pairs.into_iter());
}

/// Checks that a filter that names a process matches no other process, whatever else it says.
fn holds<'a>(filter: &Filter, mut words: impl Iterator<Item = &'a str>) {
    let Some(pid) = words.find_map(|word| word.strip_prefix("pid=")) else { return };
    let pid: u32 = pid.parse().expect("it was taken for a number");
    assert!(!filter.is_everything());
    assert!(!filter.matches(&Process { pid: pid.wrapping_add(1), ..Process::default() }));
}
