// Package receipttext is the text form of a receipt, which says what a request has taken.
package receipttext

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Receipt is what the text says. Its JSON stands in the text.
type Receipt struct {
	Limiter string       `json:"limiter"`
	Durable bool         `json:"durable,omitempty"`
	Policy  string       `json:"policy"`
	Key     string       `json:"key"`
	Units   int64        `json:"units"`
	Parts   []model.Take `json:"parts"`
}

// Parse reads what String wrote. It returns false for a text that was cut off or changed. Anybody can write a receipt,
// so what it says may still make no sense.
func Parse(text string) (r Receipt, ok bool) {
	content, ok := Open(text)
	return r, ok && json.Unmarshal(content, &r) == nil
}

func (r Receipt) String() string {
	content, _ := json.Marshal(r) // cannot fail with these types
	return Seal(content)
}

const checksumLen = 8 // bytes before the JSON, so that a receipt that was cut off or changed is noticed

// Seal makes the text of a receipt's JSON.
func Seal(content []byte) string {
	return base64.RawURLEncoding.EncodeToString(append(checksum(content), content...))
}

// Open returns the JSON of a text, and whether the text is as Seal has made it.
func Open(text string) (content []byte, ok bool) {
	content, err := base64.RawURLEncoding.DecodeString(text)
	sum := content[:min(checksumLen, len(content))]
	content = content[len(sum):]
	return content, err == nil && bytes.Equal(checksum(content), sum)
}

func checksum(content []byte) []byte {
	sum := sha256.Sum256(content)
	return sum[:checksumLen]
}
