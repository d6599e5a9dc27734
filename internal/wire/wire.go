// Package wire has the numbers and texts of the messages between a process and a service. See package door.
package wire

import (
	"encoding/binary"
	"math"
)

// AppendInt appends a number.
func AppendInt(b []byte, n int64) []byte { return binary.AppendVarint(b, n) }

// AppendText appends a text.
func AppendText[T string | []byte](b []byte, text T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// AppendBool appends a truth value.
func AppendBool(b []byte, is bool) []byte {
	if is {
		return append(b, 1)
	}
	return append(b, 0)
}

// Reader reads a message. After a mistake in the message, all further values are zero, and Bad returns true.
type Reader struct {
	rest []byte
	bad  bool
}

// Read returns a Reader of a message.
func Read(message []byte) *Reader { return &Reader{rest: message} }

// Bad returns whether the message had a mistake.
func (r *Reader) Bad() bool { return r.bad }

// Fail makes the message a bad one.
func (r *Reader) Fail() { r.rest, r.bad = nil, true }

// Ended returns whether the message was good, and all of it was read.
func (r *Reader) Ended() bool { return !r.bad && len(r.rest) == 0 }

// Rest returns what was not read yet.
func (r *Reader) Rest() []byte { return r.rest }

// Int reads a number.
func (r *Reader) Int() int64 {
	n, size := binary.Varint(r.rest)
	if size <= 0 {
		r.Fail()
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// Int16 reads a number of 16 bits.
func (r *Reader) Int16() int16 {
	n := r.Int()
	if n < math.MinInt16 || n > math.MaxInt16 {
		r.Fail()
		return 0
	}
	return int16(n)
}

// Count reads how many values follow. Each value has at least one byte, so a short message cannot ask for much memory.
func (r *Reader) Count() int {
	n := r.Int()
	if n < 0 || n > int64(len(r.rest)) {
		r.Fail()
		return 0
	}
	return int(n)
}

// Byte reads a byte.
func (r *Reader) Byte() byte {
	if len(r.rest) == 0 {
		r.Fail()
		return 0
	}
	b := r.rest[0]
	r.rest = r.rest[1:]
	return b
}

// Bool reads a truth value.
func (r *Reader) Bool() bool { return r.Byte() != 0 }

// Bytes reads a text. The result is a part of the message.
func (r *Reader) Bytes() []byte {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 || n > uint64(len(r.rest)-size) {
		r.Fail()
		return nil
	}
	text := r.rest[size : size+int(n)]
	r.rest = r.rest[size+int(n):]
	return text
}

// Take reads the next n bytes. The result is a part of the message.
func (r *Reader) Take(n int) []byte {
	if n > len(r.rest) {
		r.Fail()
		return nil
	}
	text := r.rest[:n]
	r.rest = r.rest[n:]
	return text
}

// Uint reads a number that is not negative, and was not appended by AppendInt.
func (r *Reader) Uint() uint64 {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 {
		r.Fail()
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// Text reads a text.
func (r *Reader) Text() string { return string(r.Bytes()) }
