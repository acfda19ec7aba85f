//! Folded stacks: one line per stack, for flame graph tools and `sort`.

use std::io::{self, Write as _};

use super::{FormatError, WriteOptions};
use crate::chains::Chains;
use crate::escape::escaped;
use crate::model::Profile;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    lines(profile, options, |line| Ok(out.write_all(line)?))
}

/// Passes each line, including its line feed, to `each`.
pub(super) fn lines(
    profile: &Profile,
    options: &WriteOptions,
    mut each: impl FnMut(&[u8]) -> Result<(), FormatError>,
) -> Result<(), FormatError> {
    let chains = Chains::new(profile, &[options.value_of(profile)?], options.group_of(profile), false);
    let names: Vec<String> = chains.names.iter().map(|name| plain(&name.name)).collect();
    let mut line = Vec::new();
    for (chain, value) in chains.chains.iter().zip(&chains.columns[0]) {
        line.clear();
        for &name in chain {
            line.extend_from_slice(names[name as usize].as_bytes());
            line.push(b';');
        }
        line.pop();
        writeln!(line, " {value}")?;
        each(&line)?;
    }
    Ok(())
}

/// The name without characters that separate names or lines.
fn plain(name: &str) -> String {
    escaped(name).replace(';', ":")
}

#[cfg(test)]
mod tests {
    use crate::testing;

    #[test]
    fn lines_are_root_first_and_add_up() {
        let mut profile = testing::small();
        profile.processes[1].comm = "we;ird\nname".into();
        let text = testing::text(&profile, "folded");
        let mut sum = 0;
        for line in text.lines() {
            let (chain, value) = line.rsplit_once(' ').expect("a value");
            sum += value.parse::<i64>().expect("a number");
            assert!(chain.starts_with("server (4242);") || chain.starts_with("we:ird\\nname (4300);"), "{line}");
        }
        let total: f64 = profile.rows.iter().map(|row| row.inuse.bytes).sum();
        assert_eq!(sum, total.round() as i64);
    }
}
