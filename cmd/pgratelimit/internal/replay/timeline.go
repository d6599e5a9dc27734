package replay

import "time"

// Span is what a policy did in a span of time.
type Span struct {
	Begin   time.Time `json:"begin"`
	Seconds int64     `json:"seconds"`
	Allowed int64     `json:"allowed"`
	Denied  int64     `json:"denied"`
}

// mostSpans is how many spans a timeline has at most. When there are more, two become one.
const mostSpans = 240

// timeline counts over time. Times never go back.
type timeline struct {
	begin, width    int64 // seconds since 1970, and seconds
	last            int   // the span of the last request
	allowed, denied []int64
}

func (t *timeline) count(micros int64, allowed bool) {
	at := micros / 1e6
	if t.width == 0 {
		t.begin, t.width = at, 1
		t.allowed, t.denied = make([]int64, mostSpans), make([]int64, mostSpans)
	}
	for at-t.begin >= mostSpans*t.width {
		for i := range mostSpans / 2 {
			t.allowed[i] = t.allowed[2*i] + t.allowed[2*i+1]
			t.denied[i] = t.denied[2*i] + t.denied[2*i+1]
		}
		clear(t.allowed[mostSpans/2:])
		clear(t.denied[mostSpans/2:])
		t.width *= 2
	}
	t.last = int((at - t.begin) / t.width)
	if allowed {
		t.allowed[t.last]++
	} else {
		t.denied[t.last]++
	}
}

func (t *timeline) spans() []Span {
	all := []Span{}
	for i := 0; t.width > 0 && i <= t.last; i++ {
		begin := time.Unix(t.begin+int64(i)*t.width, 0).UTC()
		all = append(all, Span{begin, t.width, t.allowed[i], t.denied[i]})
	}
	return all
}
