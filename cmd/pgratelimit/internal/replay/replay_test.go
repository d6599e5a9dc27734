package replay

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTimes(t *testing.T) {
	t.Parallel()
	want := time.Date(2024, 2, 29, 23, 59, 58, 0, time.UTC).UnixMicro()
	for text, micros := range map[string]int64{
		"2024-02-29T23:59:58Z":             want,
		"2024-02-29 23:59:58":              want,
		"2024-02-29T23:59:58.123456Z":      want + 123456,
		"2024-02-29 23:59:58,5+00":         want + 500000,
		"2024-03-01T01:59:58.000001+02:00": want + 1,
		"2024-02-29T18:29:58-0530":         want,
		"29/Feb/2024:23:59:58 +0000":       want,
		"01/Mar/2024:00:59:58 +0100":       want,
		"1709251198":                       want,
		"1709251198.25":                    want + 250000,
		"1709251198123":                    want + 123000,
		"1709251198123456":                 want + 123456,
		"1709251198123456789":              want + 123456,
	} {
		got, err := parseTime([]byte(text), "")
		require.NoError(t, err, text)
		require.Equal(t, micros, got, text)
	}
	for _, text := range []string{
		"", "-", "now", "2024", "2024-13-01T00:00:00Z", "2024-02-29", "29/Foo/2024:23:59:58 +0000", "1.x", "1969-12-31T00:00:00Z",
		"29/Feb/2024:23:59:58 CET", "99999999999999999999", "29/", "2024-02-29T25:00:00Z",
	} {
		if text == "2024" { // seconds since 1970
			continue
		}
		_, err := parseTime([]byte(text), "")
		require.Error(t, err, text)
	}
	got, err := parseTime([]byte("29.02.2024 23:59:58"), "02.01.2006 15:04:05")
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestTimesAreThoseOfPackageTime(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		at := time.Unix(r.Int64N(7_000_000_000), 0).In(time.FixedZone("", (r.IntN(25)-12)*3600))
		if at.Year() < 1970 {
			continue
		}
		for _, layout := range []string{time.RFC3339, "02/Jan/2006:15:04:05 -0700"} {
			got, err := parseTime([]byte(at.Format(layout)), "")
			require.NoError(t, err)
			require.Equal(t, at.UnixMicro(), got, at.Format(layout))
		}
	}
}

func values(t *testing.T, f format, n int, line string) ([]string, error) {
	t.Helper()
	found := make([][]byte, n)
	err := f.fields([]byte(line), found)
	texts := make([]string, n)
	for i, value := range found {
		texts[i] = string(value)
	}
	return texts, err
}

func TestAccessLog(t *testing.T) {
	t.Parallel()
	f, err := newAccessLog([]string{"time", "", "remote_addr", "remote_user", "method", "path", "status", "user_agent"})
	require.NoError(t, err)
	for line, want := range map[string][]string{
		`192.0.2.1 - - [29/Feb/2024:23:59:58 +0000] "GET /a?b=c HTTP/1.1" 200 12 "-" "curl/8"`: {
			"29/Feb/2024:23:59:58 +0000", "", "192.0.2.1", "-", "GET", "/a", "200", "curl/8",
		},
		`2001:db8::1 - Anna Maria [29/Feb/2024:23:59:58 +0000] "POST /" 404 -`: { // common, and a name with a space
			"29/Feb/2024:23:59:58 +0000", "", "2001:db8::1", "Anna Maria", "POST", "/", "404", "",
		},
		`192.0.2.1 - - [29/Feb/2024:23:59:58 +0000] "\x16\x03\x01 \"" 400 0 "-" "a \"b\" c" more`: {
			"29/Feb/2024:23:59:58 +0000", "", "192.0.2.1", "-", `\x16\x03\x01`, `\"`, "400", `a \"b\" c`,
		},
		`192.0.2.1 - - [29/Feb/2024:23:59:58 +0000] "-" 408 0`: { // nothing was sent
			"29/Feb/2024:23:59:58 +0000", "", "192.0.2.1", "-", "-", "", "408", "",
		},
	} {
		got, err := values(t, f, len(want), line)
		require.NoError(t, err, line)
		require.Equal(t, want, got, line)
	}
	for _, line := range []string{"", "x", "192.0.2.1 - - [29/Feb", "192.0.2.1 - - 29/Feb", "a [b] c", " [b] \"c\""} {
		_, err := values(t, f, 8, line)
		require.Error(t, err, line)
	}
	_, err = newAccessLog([]string{"nothing"})
	require.Error(t, err)
}

func TestCSV(t *testing.T) {
	t.Parallel()
	never := func(string) bool { return false }
	f, err := newCSV([]byte("key,\"a \"\"b\"\"\",time"), []string{"time", "key", `a "b"`}, never)
	require.NoError(t, err)
	got, err := values(t, f, 3, `"x, ""y""",2,3,4`)
	require.NoError(t, err)
	require.Equal(t, []string{"3", `x, "y"`, "2"}, got)
	for _, line := range []string{"1,2", `"1`, `"1"2,3,4`} {
		_, err := values(t, f, 3, line)
		require.Error(t, err, line)
	}
	_, err = newCSV([]byte("a;b"), []string{"b", "c"}, never)
	require.Error(t, err)
	f, err = newCSV([]byte("a;b"), []string{"b", "a"}, never)
	require.NoError(t, err)
	got, err = values(t, f, 2, "1;2")
	require.NoError(t, err)
	require.Equal(t, []string{"2", "1"}, got)
}

func TestJSONLines(t *testing.T) {
	t.Parallel()
	f := newJSON([]string{"time", "", "$.user.id", "list.1", `odd"name`})
	got, err := values(t, f, 5,
		` {"x": {"time": "}"}, "user" : {"n":[1,{"id":2}], "id":"\u00e9\ud83d\ude00\n\""}, "list":[1, 2.5],"odd\"name":true,"time":17 }`)
	require.NoError(t, err)
	require.Equal(t, []string{"17", "", "é😀\n\"", "2.5", "true"}, got)
	got, err = values(t, f, 5, `{"user": 5, "time": null}`)
	require.NoError(t, err)
	require.Equal(t, make([]string, 5), got)
	for _, line := range []string{"", "[1]", `{"a"`, `{"a":1`, `{"a" 1}`, `{a:1}`, `{"user":{"id":"`, `{"time":"\u12"}`} {
		_, err := values(t, f, 5, line)
		require.Error(t, err, line)
	}
}

// write writes a log to a new file.
func write(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// read returns the requests of files, as "seconds key cost".
func read(t *testing.T, in Input) ([]string, Lines, error) {
	t.Helper()
	in.Progress = func(int64) {}
	keys, all := newKeyring(), []string(nil)
	lines, err := in.each(t.Context(), keys, func(q request) {
		all = append(all, fmt.Sprintf("%d %s %d", q.at/1e6, keys.names[q.key], q.cost))
	})
	return all, lines, err
}

func TestFilesAreMergedByTime(t *testing.T) {
	t.Parallel()
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, err := w.Write([]byte("time,key\n10,a\n12,a\n30,a\n29,a\n11,late\n"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	got, lines, err := read(t, Input{
		Files: []string{
			write(t, "a.gz", zipped.String()), "-", write(t, "empty", ""),
			write(t, "b.json", "{\"time\":11,\"key\":\"b\"}\n\nbad\n{\"time\":31,\"key\":\"\"}\n{\"time\":31,\"key\":\"b\"}"),
		},
		Stdin:     strings.NewReader("time;key;cost\r\n9;c;2\r\n32;c;0\r\n32;c;3\r\n"),
		Tolerance: 2e6, MaxBad: 0.5,
	})
	require.NoError(t, err)
	require.Equal(t, []string{"9 c 2", "10 a 1", "11 b 1", "12 a 1", "12 late 1", "29 a 1", "30 a 1", "31 b 1", "32 c 3"}, got)
	require.EqualValues(t, 12, lines.Read)
	require.EqualValues(t, 3, lines.Bad)
	require.EqualValues(t, 1, lines.Late)
	require.Len(t, lines.First, 3)
	for _, bad := range lines.First {
		require.Positive(t, bad.Line)
	}
}

func TestTooManyBadLines(t *testing.T) {
	t.Parallel()
	_, _, err := read(t, Input{Files: []string{"-"}, Stdin: strings.NewReader("time,key\n1,secret\nx,secret\n"), MaxBad: 0.4})
	require.ErrorContains(t, err, "1 of 2 lines cannot be read; - line 3: the time cannot be read")
	require.NotContains(t, err.Error(), "secret")
	_, _, err = read(t, Input{Files: []string{"-"}, Stdin: strings.NewReader("{\"at\":1,\"key\":\"secret\"}\n")})
	require.ErrorContains(t, err, "the time is missing; --time names its field")
}

// What programs on Windows, hostile clients and broken disks write.
func TestOddInput(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"\ufefftime,key\r\n1,a\r\n":                                                                    {"1 a 1"},
		"\r\n\ntime;key\n1;\"a;\"\"b\"\n\n":                                                            {`1 a;"b 1`},
		"\ufeff{\"time\":1,\"key\":\"a\"}":                                                             {"1 a 1"},
		"\ufeff::1 - - [01/Jan/1970:00:00:01 +0000] \"\" 400 0":                                        {"1 ::1 1"},
		`{"time":1,"key":"\ud800"}` + "\n" + `{"key":"<script>\u202e\u0000","time":"2"}`:               {"1 \ufffd 1", "2 <script>\u202e\x00 1"},
		`{"x":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + `,"time":1,"key":"a"}`: {"1 a 1"},
		`{"time":1,"key":{"a":[1]},"cost":"9"}`:                                                        {`1 {"a":[1]} 1`},
		`{"time":1,"key":"` + strings.Repeat("é", 256) + `"}`:                                          {"1 " + strings.Repeat("é", 256) + " 1"},
		"time,key,cost\n1,a,9223372036854775807\n":                                                     {"1 a 9223372036854775807"},
	} {
		got, _, err := read(t, Input{Files: []string{"-"}, Stdin: strings.NewReader(text)})
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for text, want := range map[string]string{
		`{"time":1,"key":"` + strings.Repeat("é", 257) + `"}`:        "longer than 512 bytes",
		`{"time":1,"key":"` + strings.Repeat("secret", 1<<18) + `"}`: "does not have the format", // cut
		`{"time":1,"key":"a`:                               "does not have the format",
		`{"time":1e9,"key":"a"}`:                           "the time cannot be read",
		"time,key,cost\n1,a,0\n":                           "whole number",
		"time,key,cost\n1,a,9223372036854775808\n":         "whole number",
		"time,key\n1,\"secret\n2,secret\"\n":               "does not have the format",
		"time,user\n1,a\n":                                 `no column "key"`,
		"\x00\x01\x02":                                     "cannot be guessed",
		"\xff\xfet\x00i\x00m\x00e\x00,\x00k\x00e\x00y\x00": "no column",
		"\x1f\x8bthis is no gzip":                          "gzip: invalid header",
	} {
		_, _, err := read(t, Input{Files: []string{"-"}, Stdin: strings.NewReader(text)})
		require.ErrorContains(t, err, want, "%.100q", text)
		require.NotContains(t, err.Error(), "secret")
	}
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, err := w.Write([]byte("time,key\n1,a\n"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	_, _, err = read(t, Input{Files: []string{"-"}, Stdin: bytes.NewReader(zipped.Bytes()[:zipped.Len()-5])})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	twice := append(bytes.Clone(zipped.Bytes()), zipped.Bytes()...) // as cat of two files writes it
	got, _, err := read(t, Input{Files: []string{"-"}, Stdin: bytes.NewReader(twice), MaxBad: 0.4})
	require.NoError(t, err)
	require.Equal(t, []string{"1 a 1", "1 a 1"}, got)
}

// A log with the newest line first is refused, and one that is out of order within the tolerance is put in order.
func TestOrder(t *testing.T) {
	t.Parallel()
	const n = 20_000
	var backwards, shuffled bytes.Buffer
	backwards.WriteString("time,key\n")
	shuffled.WriteString("time,key,cost\n")
	var want []string
	for i, at := range rand.New(rand.NewPCG(1, 9)).Perm(n) {
		fmt.Fprintf(&backwards, "%d,a\n", n-i)
		fmt.Fprintf(&shuffled, "%d,a,%d\n", at/10+1, i+1) // ten lines have the same time, and keep their order
		want = append(want, fmt.Sprintf("%d a %d", at/10+1, i+1))
	}
	slices.SortStableFunc(want, func(a, b string) int {
		first, _ := strconv.Atoi(strings.Fields(a)[0])
		second, _ := strconv.Atoi(strings.Fields(b)[0])
		return first - second
	})
	_, _, err := read(t, Input{Files: []string{"-"}, Stdin: &backwards, Tolerance: 10e6, MaxBad: 0.01})
	require.ErrorContains(t, err, "lines come later than --tolerance allows: sort the log")
	got, lines, err := read(t, Input{Files: []string{"-"}, Stdin: &shuffled, Tolerance: n * 1e6})
	require.NoError(t, err)
	require.Zero(t, lines.Late)
	require.Equal(t, want, got)
}

// A cost that no limit allows is denied, however large it is.
func TestLargestCost(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"fixed 5/10s", "sliding 5/10s", "bucket 5 2/3s", "log 5/10s", "every 5/10s", "every 5/month"} {
		p, err := ParsePolicy(text)
		require.NoError(t, err)
		r := newRun(p, nil)
		for _, cost := range []int64{1, math.MaxInt64, math.MaxInt64 - 1, 6} {
			require.Equal(t, cost == 1, r.decide(request{at: 1, cost: cost}, ""), text)
		}
		require.EqualValues(t, 3, r.never, text)
	}
}

// The states of keys that count nothing any more are dropped, and that changes no answer.
func TestIdleKeysAreDropped(t *testing.T) {
	t.Parallel()
	p, err := ParsePolicy("sliding 3/1s + log 4/2s")
	require.NoError(t, err)
	r, whole := newRun(p, nil), newRun(p, nil)
	whole.swept = 1 << 40
	most := 0
	dice := rand.New(rand.NewPCG(3, 4))
	for i := range int64(100_000) {
		// each key has requests for 3 s, and never again
		q := request{at: i * 1000, cost: 1 + dice.Int64N(2), key: max(int32(i/100)-dice.Int32N(30), 0)*10 + dice.Int32N(10)}
		require.Equal(t, whole.decide(q, ""), r.decide(q, ""))
		most = max(most, r.live)
	}
	require.Equal(t, whole.denied, r.denied)
	require.Positive(t, r.denied)
	require.Greater(t, whole.live, 9000)
	require.Less(t, most, 3000)
}

// A sweep finds the same limit as trying each one.
func TestSweepFindsTheSmallestLimit(t *testing.T) {
	t.Parallel()
	dice := rand.New(rand.NewPCG(5, 6))
	log, at := "time,key\n", 1000.0
	for range 3000 {
		at += dice.ExpFloat64() * 0.3
		log += fmt.Sprintf("%.3f,%d\n", at, int(dice.ExpFloat64()*3))
	}
	in := Input{Files: []string{write(t, "log", log)}, Progress: func(int64) {}}
	for _, policy := range []string{"fixed N/1m", "sliding N/1m", "log N/1m", "every N/1m", "bucket N 1/5s", "bucket 5 N/1m"} {
		for _, text := range []string{"0.5%", "2 keys", "0%"} {
			target, err := ParseTarget(text)
			require.NoError(t, err)
			s, err := in.sweep(t.Context(), policy, target, nil, 1000)
			require.NoError(t, err)
			var each []int64
			for limit := int64(1); limit <= 160; limit++ {
				each = append(each, limit)
			}
			points, err := in.try(t.Context(), policy, each, nil, 1000)
			require.NoError(t, err)
			want := int64(0)
			for i, p := range points {
				if i > 0 {
					require.LessOrEqual(t, p.Denied, points[i-1].Denied)
				}
				if want == 0 && target.metBy(p) {
					want = p.Limit
				}
			}
			if want == 0 {
				require.Contains(t, policy, "bucket", text) // no capacity helps if the refill is small, and the reverse
				continue
			}
			require.NotNil(t, s.Limit)
			require.Equal(t, want, *s.Limit, "%s %s", policy, text)
		}
	}
}

func FuzzTime(f *testing.F) {
	f.Add("2024-02-29T23:59:58.5+01:00")
	f.Add("29/Feb/2024:23:59:58 +0000")
	f.Add("1709251198.25")
	f.Fuzz(func(t *testing.T, text string) {
		if micros, err := parseTime([]byte(text), ""); err == nil && micros < 0 {
			t.Fatal(text, micros)
		}
	})
}

func fuzz(f *testing.F, form format, n int, seeds ...string) {
	f.Helper()
	for _, seed := range seeds {
		f.Add(seed)
	}
	f.Fuzz(func(_ *testing.T, line string) { _ = form.fields([]byte(line), make([][]byte, n)) })
}

func FuzzAccessLog(f *testing.F) {
	form, err := newAccessLog(append(accessFields, ""))
	require.NoError(f, err)
	fuzz(f, form, len(accessFields)+1, `192.0.2.1 - - [29/Feb/2024:23:59:58 +0000] "GET /a?b=c HTTP/1.1" 200 12 "-" "curl/8"`)
}

func FuzzCSV(f *testing.F) {
	form, err := newCSV([]byte("a,b,c"), []string{"a", "c"}, nil)
	require.NoError(f, err)
	fuzz(f, form, 2, `1,"a ""b""",3`)
}

func FuzzJSON(f *testing.F) {
	fuzz(f, newJSON([]string{"time", "user.id", "l.1.x"}), 3, `{"time":1,"user":{"id":"\u00e9"},"l":[1,{"x":[]}]}`)
}

func BenchmarkReplay(b *testing.B) {
	var log strings.Builder
	dice := rand.New(rand.NewPCG(7, 8))
	const n = 200_000
	for i := range n {
		fmt.Fprintf(&log, "10.0.%d.%d - - [%s] \"GET /index.html?x=%d HTTP/1.1\" 200 1234 \"-\" \"Mozilla/5.0 (X11)\"\n",
			dice.IntN(40), int(dice.ExpFloat64()*40)%256,
			time.Unix(1_700_000_000+int64(i/50), 0).UTC().Format("02/Jan/2006:15:04:05 -0700"), i)
	}
	p, err := ParsePolicy("sliding 100/1m")
	require.NoError(b, err)
	b.SetBytes(int64(log.Len()))
	b.ReportAllocs()
	for b.Loop() {
		in := Input{Files: []string{"-"}, Stdin: strings.NewReader(log.String()), Progress: func(int64) {}, Tolerance: 1e7}
		all := &replayed{keys: newKeyring(), runs: []*run{newRun(p, nil)}, maxKeys: 1000}
		_, err := in.each(b.Context(), all.keys, all.decide)
		require.NoError(b, err)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/line")
}
