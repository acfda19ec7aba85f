//! Query parameters of a request, validated.

use std::time::Duration;

use super::filter::{Filter, KEYS};

/// Maximum time that a difference may cover, in seconds.
pub const MOST_SECONDS: u64 = 3600;

/// Parameters of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    /// Which processes to include.
    pub filter: Filter,
    /// Report the difference over this time instead of everything since the start.
    pub seconds: Option<Duration>,
    /// How the profile is encoded.
    pub format: ProfileFormat,
}

/// How a profile is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProfileFormat {
    /// pprof, compressed.
    #[default]
    Pprof,
    /// JSON with everything that is known, compressed: intervals, lifetimes, losses.
    Json,
    /// The same without stacks, so that no name is waited for.
    Totals,
}

impl Parameters {
    /// Validates the decoded pairs of a query.
    ///
    /// # Errors
    /// Returns a sentence for the client.
    pub fn parse(pairs: &[(String, String)]) -> Result<Self, String> {
        let mut parameters = Self::default();
        let mut seconds = None;
        for (key, value) in pairs {
            match key.as_str() {
                "seconds" => {
                    if seconds.is_some() {
                        return Err("seconds may be given only once".into());
                    }
                    let number = value.parse::<u64>().ok().filter(|number| *number <= MOST_SECONDS);
                    seconds = Some(number.ok_or_else(|| {
                        format!("seconds must be a whole number from 0 to {MOST_SECONDS}, not {value:?}")
                    })?);
                }
                "format" => {
                    parameters.format = match value.as_str() {
                        "pprof" => ProfileFormat::Pprof,
                        "json" => ProfileFormat::Json,
                        "totals" => ProfileFormat::Totals,
                        _ => return Err(format!("format must be pprof, json or totals, not {value:?}")),
                    };
                }
                // Scrapers of Go programs add these. There is no garbage collection to run, and only one encoding.
                "gc" => {}
                "debug" if value == "0" => {}
                "debug" => {
                    return Err("debug: profiles are available only as gzip-compressed protobuf (debug=0)".into());
                }
                _ if parameters.filter.set(key, value)? => {}
                _ => return Err(format!("unknown parameter {key:?}; known are seconds, format, {KEYS}")),
            }
        }
        if seconds.is_some() && parameters.format != ProfileFormat::Pprof {
            return Err("seconds: differences are available as pprof only".into());
        }
        parameters.seconds = seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs);
        Ok(parameters)
    }
}

/// Removes the first parameter with this key from the pairs and returns its value.
pub fn taken(pairs: &mut Vec<(String, String)>, key: &str) -> Option<String> {
    let index = pairs.iter().position(|(name, _)| name == key)?;
    Some(pairs.remove(index).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_comes_in_one_of_three_formats() {
        assert_eq!(parse(&[]).unwrap().format, ProfileFormat::Pprof);
        assert_eq!(parse(&[("format", "json"), ("pid", "7")]).unwrap().format, ProfileFormat::Json);
        assert_eq!(parse(&[("format", "totals")]).unwrap().format, ProfileFormat::Totals);
        assert!(parse(&[("format", "svg")]).unwrap_err().contains("pprof, json or totals"));
        for format in ["json", "totals"] {
            assert!(parse(&[("format", format), ("seconds", "5")]).unwrap_err().contains("pprof only"));
        }
    }

    fn parse(query: &[(&str, &str)]) -> Result<Parameters, String> {
        let pairs: Vec<_> = query.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Parameters::parse(&pairs)
    }

    #[test]
    fn good_ones() {
        assert_eq!(parse(&[]), Ok(Parameters::default()));
        assert_eq!(parse(&[("seconds", "0"), ("gc", "1"), ("debug", "0")]), Ok(Parameters::default()));
        assert_eq!(parse(&[("seconds", "30")]).unwrap().seconds, Some(Duration::from_secs(30)));
        assert!(!parse(&[("pid", "1")]).unwrap().filter.is_everything());
    }

    #[test]
    fn bad_ones_are_explained() {
        for (query, part) in [
            (&[("seconds", "-1")][..], "whole number"),
            (&[("seconds", "1.5")], "whole number"),
            (&[("seconds", "3601")], "3600"),
            (&[("seconds", "99999999999999999999")], "whole number"),
            (&[("seconds", "")], "whole number"),
            (&[("seconds", "1"), ("seconds", "2")], "once"),
            (&[("debug", "1")], "protobuf"),
            (&[("pid", "abc")], "process id"),
            (&[("what", "1")], "known are"),
        ] {
            assert!(parse(query).unwrap_err().contains(part), "{query:?}: {:?}", parse(query));
        }
    }
}
