//! Compares the pprof reader with Go's: random profiles, encoded in every order that the format allows, must give the
//! same stacks and sums in both.

use std::collections::BTreeMap;
use std::process::Command;

use prost::Message as _;

use super::*;
use crate::proto::pprof as proto;

/// Number of profiles to compare, unless `HEAPBPF_TEST_PROFILES` sets another.
const PROFILES: u64 = 24;

/// A random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Sums by stack: function names, innermost first, and the values of the profile's types.
type Stacks = BTreeMap<Vec<String>, [i64; 4]>;

/// A profile of another profiler, and the order of its four columns.
fn random_profile(random: &mut Random) -> (proto::Profile, [usize; 4]) {
    let mut strings = vec![String::new()];
    let mut text = |text: String| {
        strings.push(text);
        strings.len() as i64 - 1
    };
    let mut names = ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space"].map(String::from);
    // Go's own column order would make it a Go heap profile, whose samples are recounted.
    while names[0] == "alloc_objects" {
        random.shuffle(&mut names);
    }
    let columns = ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space"]
        .map(|wanted| names.iter().position(|name| name == wanted).unwrap());
    let unit = |name: &str| if name.ends_with("objects") { "count" } else { "bytes" }.to_owned();
    let sample_type: Vec<_> =
        names.iter().map(|name| proto::ValueType { r#type: text(name.clone()), unit: text(unit(name)) }).collect();
    let spread = 1 + random.below(1 << 20) as u64;
    let function: Vec<_> = (1..=1 + random.below(20) as u64)
        .map(|number| {
            let name = text(format!("f{}::g{}", random.below(12), random.below(3)));
            proto::Function { id: number * spread, name, filename: text(format!("{number}.c")), ..Default::default() }
        })
        .collect();
    let location: Vec<_> = (1..=1 + random.below(40) as u64)
        .map(|number| {
            let mut line = || {
                let function_id = function[random.below(function.len())].id;
                proto::Line { function_id, line: 1 + random.below(1000) as i64 }
            };
            let line = (0..1 + number % 3).map(|_| line()).collect();
            proto::Location { id: number * spread, address: 0x1000 + number, line, ..Default::default() }
        })
        .collect();
    let sample = (0..random.below(60))
        .map(|_| {
            let location_id = (0..1 + random.below(12)).map(|_| location[random.below(location.len())].id).collect();
            // Negative values occur in profiles of differences.
            let value = (0..4).map(|_| random.below(1 << 40) as i64 >> random.below(40)).collect();
            proto::Sample { location_id, value, label: vec![] }
        })
        .collect();
    let period_type = Some(proto::ValueType { r#type: text("space".into()), unit: text("bytes".into()) });
    let string_table = strings;
    let profile = proto::Profile {
        sample_type,
        function,
        location,
        sample,
        period_type,
        period: 512 << 10,
        string_table,
        ..Default::default()
    };
    (profile, columns)
}

/// The message with its parts in random order, each part whole or one element at a time, plus unknown fields.
fn encoded(profile: &proto::Profile, random: &mut Random) -> Vec<u8> {
    let empty = proto::Profile::default;
    let proto::Profile { sample_type, function, location, sample, string_table, .. } = profile.clone();
    let one = |sample| proto::Profile { sample: vec![sample], ..empty() }.encode_to_vec();
    let mut parts = vec![
        proto::Profile { sample_type, ..empty() }.encode_to_vec(),
        proto::Profile { function, ..empty() }.encode_to_vec(),
        proto::Profile { location, ..empty() }.encode_to_vec(),
        proto::Profile { string_table, ..empty() }.encode_to_vec(),
        proto::Profile { period_type: profile.period_type, period: profile.period, ..empty() }.encode_to_vec(),
        // Field 500, a number, and field 501, three bytes.
        vec![0xa0, 0x1f, 0x96, 0x01],
        vec![0xaa, 0x1f, 3, 1, 2, 3],
    ];
    parts.extend(sample.into_iter().map(one));
    random.shuffle(&mut parts);
    parts.concat()
}

/// What our reader finds.
fn of_ours(bytes: &[u8]) -> Stacks {
    let profile = parse(bytes).expect("a profile");
    let mut stacks = Stacks::new();
    for row in &profile.rows {
        let frames = row.key.stack.frames.iter().map(|frame| frame.function.as_deref().unwrap().to_owned()).collect();
        let values = [row.alloc.objects, row.alloc.bytes, row.inuse.objects, row.inuse.bytes];
        add(&mut stacks, frames, values.map(|value| value.round() as i64));
    }
    stacks
}

fn add(stacks: &mut Stacks, frames: Vec<String>, values: [i64; 4]) {
    if values != [0; 4] {
        let sums = stacks.entry(frames).or_default();
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
}

/// What `go tool pprof -raw` prints: values and locations of each sample, then the locations with one line per
/// function.
fn of_go(printed: &str, columns: [usize; 4]) -> Stacks {
    let section = |name: &str, next: &str| {
        let rest = printed.split_once(name).expect("a section").1;
        rest.split_once(next).map_or(rest, |(section, _)| section)
    };
    let mut functions: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut current = "";
    for line in section("\nLocations\n", "\nMappings").lines() {
        // `     3: 0x1003 f1::g2 /3.c:17 s=0`; further functions at the same place have no number and no address.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let Some(name) = fields.iter().find(|field| field.starts_with('f') && field.contains("::g")) else { continue };
        if let Some(number) = fields[0].strip_suffix(':') {
            current = number;
        }
        functions.entry(current).or_default().push((*name).to_owned());
    }
    let mut stacks = Stacks::new();
    for line in section("\nSamples:\n", "\nLocations").lines() {
        let Some((values, locations)) = line.split_once(':') else { continue };
        let values: Vec<i64> = values.split_whitespace().filter_map(|value| value.parse().ok()).collect();
        let Ok(values) = <[i64; 4]>::try_from(values) else { continue };
        let frames = locations.split_whitespace().flat_map(|location| functions[location].clone()).collect();
        add(&mut stacks, frames, columns.map(|column| values[column]));
    }
    stacks
}

mod long {
    use super::*;

    #[test]
    fn random_profiles_are_read_as_go_reads_them() {
        let Ok(version) = Command::new("go").arg("version").output() else {
            return heapbpf_testing::skipped("no go (Debian: golang-go) to compare the reader of pprof with");
        };
        let count =
            std::env::var("HEAPBPF_TEST_PROFILES").ok().and_then(|count| count.parse().ok()).unwrap_or(PROFILES);
        let dir = std::env::temp_dir().join(format!("heapbpf-against-go-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut stacks = 0;
        for seed in 0..count {
            let mut random = Random(seed);
            let (profile, columns) = random_profile(&mut random);
            let bytes = encoded(&profile, &mut random);
            let file = dir.join("profile.pb");
            std::fs::write(&file, &bytes).unwrap();
            let mut go = Command::new("go");
            go.args(["tool", "pprof", "-symbolize=none", "-raw"]).arg(&file).env("HOME", &dir);
            let output = go.output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
            let (ours, theirs) = (of_ours(&bytes), of_go(&printed, columns));
            assert_eq!(ours, theirs, "seed {seed}:\n{printed}");
            stacks += ours.len();
        }
        std::fs::remove_dir_all(&dir).unwrap();
        println!("{count} profiles, {stacks} stacks, equal; {}", String::from_utf8_lossy(&version.stdout).trim());
        assert!(stacks > 10 * count as usize);
    }
}
