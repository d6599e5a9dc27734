package engine

import (
	"encoding/binary"
	"math/bits"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// A request travels to a service as a message, and comes back as an answer. The message has what the caller asks, and
// the answer has the decisions. The outcome is then computed from both, as without a service.

// These bits say what a message has, or a part of it.
const (
	hasPolicy = 1 << iota // the parts belong to one limiter, with one policy
	hasShadow
)
const (
	isCharge = 1 << iota
	hasDelay
	hasRefund
	hasHold
	hasSlot
)
const (
	isDurable = 1 << iota
	isFlushing
	isReturningErrors
)

// The largest sizes that a service accepts in a request.
const (
	maxMessageParts = 1024
	maxMessageKey   = 512
	maxMessageName  = 128
	maxMessageText  = 2048 // of a wish
)

// appendMessage appends the message of a request.
func (r *Request) appendMessage(b []byte) []byte {
	flags := byte(0)
	if r.Policy != nil {
		flags |= hasPolicy
	}
	if r.Shadow != nil {
		flags |= hasShadow
	}
	b = append(b, flags)
	b = wire.AppendInt(b, r.Ahead)
	b = appendParts(b, r.Parts)
	if r.Shadow != nil {
		b = appendParts(b, r.Shadow.request.Parts)
	}
	return b
}

func appendParts(b []byte, parts []Part) []byte {
	b = wire.AppendInt(b, int64(len(parts)))
	for i := range parts {
		b = parts[i].appendMessage(b)
	}
	return b
}

func (p *Part) appendMessage(b []byte) []byte {
	// The head is the same in all requests of a limiter. It has a length, so the service can look it up as a whole.
	start := len(b)
	b = p.appendHead(append(b, 0, 0))
	binary.BigEndian.PutUint16(b[start:], uint16(len(b)-start-2))
	b = wire.AppendText(b, p.Key)
	b = wire.AppendInt(b, p.Cost)
	flags := byte(0)
	if p.Charge {
		flags |= isCharge
	}
	if p.Delay != nil {
		flags |= hasDelay
	}
	if p.Refund != nil {
		flags |= hasRefund
	}
	if p.Hold != "" {
		flags |= hasHold
	}
	if p.Slot != "" {
		flags |= hasSlot
	}
	b = append(b, flags)
	if p.Delay != nil {
		b = wire.AppendInt(b, *p.Delay)
	}
	if p.Refund != nil {
		for _, n := range numbersOfTake(p.Refund) {
			b = wire.AppendInt(b, *n)
		}
	}
	if p.Hold != "" {
		b = wire.AppendText(b, p.Hold)
	}
	if p.Slot != "" {
		b = wire.AppendText(wire.AppendText(b, p.Slot), p.Wish)
	}
	if p.Hold != "" || p.Slot != "" {
		b = wire.AppendInt(b, p.TTL)
	}
	return b
}

func (p *Part) appendHead(b []byte) []byte {
	flags, n := byte(0), p.Rules.Numbers()
	if p.Space.Durable {
		flags |= isDurable
	}
	if p.Space.Flush {
		flags |= isFlushing
	}
	if p.Space.ReturnsErrors {
		flags |= isReturningErrors
	}
	b = wire.AppendText(append(b, flags), p.Space.Name)
	b = wire.AppendText(b, strings.TrimPrefix(p.Name, p.Space.Name))
	b = wire.AppendInt(wire.AppendInt(b, int64(n.Algorithm)), n.Limit)
	b = wire.AppendInt(wire.AppendInt(b, int64(n.Span)), n.Refill)
	return wire.AppendText(b, n.Zone)
}

func numbersOfTake(k *model.Take) [6]*int64 {
	return [...]*int64{&k.Units, &k.Spent, &k.Since, &k.In, &k.At, &k.Ended}
}

// Intake makes requests of the messages that come to a service. All connections of the service share its spaces, so
// that equal requests of all processes are merged. Each connection has an Intake of its own.
type Intake struct {
	engine *Engine
	spaces *Spaces
	valid  func(algorithm.Numbers) bool
	heads  map[string]*head
}

// head is what the messages of a limiter have in common.
type head struct {
	space  *Space
	policy *model.Policy // of a request with this part only
	rules  model.Rules
	name   string
}

// maxHeads is how many heads a connection remembers, and maxSpaces how many spaces a service remembers. If there are
// more, all are forgotten, and the next requests make them anew.
const (
	maxHeads  = 4096
	maxSpaces = 65536
)

// Spaces are the spaces of the limiters that ask a service. The zero Spaces is ready to use.
type Spaces struct {
	mu  sync.Mutex
	all map[spaceID]*Space
}

type spaceID struct {
	name  string
	flags byte
}

func (s *Spaces) of(e *Engine, id spaceID) *Space {
	s.mu.Lock()
	defer s.mu.Unlock()
	if space := s.all[id]; space != nil {
		return space
	}
	if s.all == nil || len(s.all) >= maxSpaces {
		s.all = map[spaceID]*Space{}
	}
	space := &Space{
		Engine: e, Name: id.name, Durable: id.flags&isDurable != 0, Flush: id.flags&isFlushing != 0,
		ReturnsErrors: id.flags&isReturningErrors != 0,
	}
	s.all[id] = space
	return space
}

// NewIntake returns an Intake for a connection. The function valid says whether a policy may have these numbers.
func (e *Engine) NewIntake(spaces *Spaces, valid func(algorithm.Numbers) bool) *Intake {
	return &Intake{engine: e, spaces: spaces, valid: valid, heads: map[string]*head{}}
}

// Request makes a request of a message. It returns nil if the message is not valid.
func (in *Intake) Request(m *wire.Reader) *Request {
	flags, ahead := m.Byte(), m.Int()
	r := in.engine.Requests.Get(nil, nil)
	r.apart = ahead > 0 // a lease is for the process that asks, and not for others whose requests are merged with it
	r.Ahead = ahead
	first := in.parts(m, r, flags&hasPolicy != 0)
	if first == nil || ahead < 0 || ahead > 0 && (r.Policy == nil || r.Parts[0].Cost < 1) {
		return nil
	}
	if r.Space = first.space; r.Policy == nil && len(r.Parts) > 1 {
		r.Space = &in.engine.sets
	}
	if flags&hasShadow != 0 {
		s := &Shadow{}
		s.request.Parts, s.request.place = s.request.Single[:0], 1
		first := in.parts(m, &s.request, true)
		if first == nil || r.Policy == nil || s.request.Parts[0].Cost != r.Parts[0].Cost {
			return nil
		}
		s.request.Space = first.space
		for i := range s.request.Parts {
			s.request.Parts[i].Decision.Granted = PassedOver
		}
		r.Shadow = s
	}
	if !m.Ended() {
		return nil
	}
	return r
}

// parts adds the parts of a message to a request, and returns the head of the first one, or nil.
func (in *Intake) parts(m *wire.Reader, r *Request, policy bool) *head {
	n := m.Count()
	if n < 1 || n > maxMessageParts || policy && n > algorithm.MaxPolicies {
		return nil
	}
	var first *head
	for i := range n {
		h := in.head(m)
		if h == nil {
			return nil
		}
		r.Parts = append(r.Parts, Part{Space: h.space, Rules: h.rules, Name: h.name})
		if !r.Parts[i].read(m) {
			return nil
		}
		if i == 0 {
			first = h
			continue
		}
		p, one := &r.Parts[i], &r.Parts[0]
		if p.Charge != one.Charge || p.Hold != one.Hold || p.TTL != one.TTL || (p.Delay == nil) != (one.Delay == nil) ||
			p.Slot != "" || one.Slot != "" || !policy && p.Cost < 0 ||
			policy && (p.Space != one.Space || p.Key != one.Key || p.Cost != one.Cost) {
			return nil
		}
	}
	switch {
	case !policy:
	case n == 1:
		r.Policy = first.policy
	default:
		rules := make([]model.Rules, n)
		for i := range rules {
			rules[i] = r.Parts[i].Rules
		}
		r.Policy = model.NewPolicy(rules...)
	}
	return first
}

// head reads the head of a part. It returns nil if the head is not valid.
func (in *Intake) head(m *wire.Reader) *head {
	size := int(m.Byte())<<8 | int(m.Byte())
	text := m.Take(size)
	if h := in.heads[string(text)]; h != nil || m.Bad() {
		return h
	}
	m2 := wire.Read(text)
	flags, name := m2.Byte(), m2.Text()
	row := name + m2.Text()
	numbers := algorithm.Numbers{
		Algorithm: m2.Int16(), Limit: m2.Int(), Span: time.Duration(m2.Int()), Refill: m2.Int(), Zone: m2.Text(),
	}
	if !m2.Ended() || flags > isDurable|isFlushing|isReturningErrors || !isMessageText(name, maxMessageName) ||
		!isMessageText(row, maxMessageName) || !isMessageText("-"+numbers.Zone, maxMessageName) ||
		!algorithm.Known(numbers.Algorithm) || !in.valid(numbers) {
		return nil
	}
	rules := model.Of(numbers)
	h := &head{
		space: in.spaces.of(in.engine, spaceID{name, flags}), policy: model.NewPolicy(rules), rules: rules, name: row,
	}
	if len(in.heads) >= maxHeads {
		clear(in.heads)
	}
	in.heads[string(text)] = h
	return h
}

// read reads what follows the head of a part, and returns whether it is valid.
func (p *Part) read(m *wire.Reader) bool {
	p.Key, p.Cost = m.Text(), m.Int()
	flags := m.Byte()
	p.Charge = flags&isCharge != 0
	if flags&hasDelay != 0 {
		p.Delay = new(m.Int())
	}
	if flags&hasRefund != 0 {
		p.Refund = &model.Take{}
		for _, n := range numbersOfTake(p.Refund) {
			*n = m.Int()
		}
	}
	if flags&hasHold != 0 {
		p.Hold = m.Text()
	}
	if flags&hasSlot != 0 {
		p.Slot, p.Wish = m.Text(), m.Text()
	}
	if flags&(hasHold|hasSlot) != 0 {
		p.TTL = m.Int()
	}
	return !m.Bad() && p.isSound()
}

// isSound returns whether the library itself could have made a part. If it could not, the error of the part could be
// that of all requests in the same statement.
func (p *Part) isSound() bool {
	of := p.Rules.Numbers()
	switch {
	case !isMessageText(p.Key, maxMessageKey), p.Cost < -model.MaxProduct, p.Cost > model.MaxProduct,
		p.Hold != "" && !isID(p.Hold), p.Slot != "" && (!isID(p.Slot) || p.Hold != "" || p.Charge || p.Delay != nil),
		len(p.Wish) > maxMessageText, p.TTL < 0, p.TTL > model.MaxSpan,
		of.HasSlots() && p.Slot == "" && p.Cost != 0, // nothing is taken from slots
		p.Slot != "" && (!of.HasSlots() || p.Cost < 0 || p.Cost > of.Limit || p.TTL > 0 && p.Cost == 0),
		p.Charge && (p.Cost < 0 || p.Delay != nil),
		p.Hold != "" && p.Delay != nil:
		return false
	case p.Delay != nil && (*p.Delay < 0 || *p.Delay > model.MaxSpan || of.Algorithm != algorithm.TokenBucket):
		return false
	case p.Refund != nil:
		k := p.Refund
		return p.Cost < 0 && !p.Charge && p.Hold == "" && p.Slot == "" && p.Delay == nil &&
			k.Spent >= 0 && k.Spent <= model.MaxProduct && k.Ended >= 0 && k.Ended <= model.MaxProduct
	}
	return true
}

// isMessageText returns whether Postgres can store a text of up to this many bytes.
func isMessageText(text string, most int) bool {
	return text != "" && len(text) <= most && utf8.ValidString(text) && strings.IndexByte(text, 0) < 0
}

// isID returns whether a text is a UUID.
func isID(text string) bool {
	if len(text) != 36 {
		return false
	}
	for i, c := range []byte(text) {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		hex := c >= '0' && c <= '9' || c >= 'a' && c <= 'f'
		if dash && c != '-' || !dash && !hex {
			return false
		}
	}
	return true
}

// AppendAnswer appends the answer to a decided request.
func (r *Request) AppendAnswer(b []byte) []byte {
	b = wire.AppendInt(b, r.place)
	b = appendDecisions(b, r.Parts)
	if r.Shadow == nil {
		return b
	}
	b = wire.AppendInt(b, r.Shadow.request.place)
	return appendDecisions(b, r.Shadow.request.Parts)
}

// readAnswer reads the answer to a request. It returns false if the answer is not one to this request.
func (r *Request) readAnswer(m *wire.Reader) bool {
	r.place = m.Int()
	readDecisions(m, r.Parts)
	if r.Shadow != nil {
		r.Shadow.request.place = m.Int()
		readDecisions(m, r.Shadow.request.Parts)
	}
	return m.Ended()
}

func appendDecisions(b []byte, parts []Part) []byte {
	for i := range parts {
		d := &parts[i].Decision
		numbers := numbersOf(d)
		set := uint64(0)
		for j, n := range numbers {
			if *n != 0 {
				set |= 1 << j
			}
		}
		b = binary.AppendUvarint(b, set)
		for ; set != 0; set &= set - 1 {
			b = wire.AppendInt(b, *numbers[bits.TrailingZeros64(set)])
		}
		b = wire.AppendInt(b, d.DecidedAt.UnixMicro())
		b = wire.AppendText(b, string(d.State.Log))
	}
	return b
}

func readDecisions(m *wire.Reader, parts []Part) {
	for i := range parts {
		var d model.Decision
		numbers := numbersOf(&d)
		set := m.Uint()
		if set >= 1<<len(numbers) {
			m.Fail()
		}
		for ; set != 0 && !m.Bad(); set &= set - 1 {
			*numbers[bits.TrailingZeros64(set)] = m.Int()
		}
		d.DecidedAt = time.UnixMicro(m.Int())
		d.State.Log = model.Entries(m.Text())
		parts[i].Decision = d
	}
}

// numbersOf returns the numbers of a decision, but for DecidedAt and the log.
func numbersOf(d *model.Decision) [21]*int64 {
	s, k := &d.State, &d.Taken
	return [...]*int64{
		&d.Granted, &d.Remaining, &d.RetryAfter, &d.ResetAfter, &d.Held,
		&s.Count, &s.PrevCount, &s.WindowStart, &s.Credit, &s.Scale, &s.ExpiresAt, &s.Since, &s.Capacity, &s.Refill,
		&s.Returned, &k.Units, &k.Spent, &k.Since, &k.In, &k.At, &k.Ended,
	}
}
