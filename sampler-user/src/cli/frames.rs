//! How tables show frames: from the command line's options and this host's rules.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::OnceLock;

use heapbpf_profile::origin::FrameRules;
use heapbpf_profile::report::FrameView;

use super::error::PlanError;
use super::record_args::FrameArgs;

/// Rules of this host. They take precedence over the built-in ones.
const PATH: &str = "/etc/heapbpf.frames";

/// Combines options and rules.
///
/// # Errors
/// The rules file cannot be read, or has an invalid line.
pub fn view(args: FrameArgs) -> Result<FrameView, PlanError> {
    static RULES: OnceLock<FrameRules> = OnceLock::new();
    let rules = match rules_in(Path::new(PATH))? {
        Some(rules) => RULES.get_or_init(|| rules),
        None => FrameRules::standard(),
    };
    Ok(FrameView { rules, all_frames: args.all_frames, full_names: args.full_names })
}

/// Returns the rules of a file together with the built-in ones. `None` if the file does not exist.
fn rules_in(path: &Path) -> Result<Option<FrameRules>, PlanError> {
    let fails = |why: String| PlanError::Usage(format!("{}: {why}", path.display()));
    match std::fs::read_to_string(path) {
        Ok(text) => FrameRules::with(&text).map(Some).map_err(|error| fails(error.to_string())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fails(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_rules_are_read_or_refused_with_their_line() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("frames");
        assert!(rules_in(&path).expect("no file").is_none());
        std::fs::write(&path, "library function shop::base::*\n").expect("writable");
        let rules = rules_in(&path).expect("valid").expect("a file");
        assert_eq!(rules.origin_of("shop::base::f", "", ""), heapbpf_profile::origin::Origin::Library);
        std::fs::write(&path, "\nlibrary\n").expect("writable");
        let error = rules_in(&path).expect_err("no rule").to_string();
        assert!(error.contains("frames: line 2, column 8: "), "{error}");
    }
}
